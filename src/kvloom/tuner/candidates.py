"""What a layer can be: a format of its keys, a format of its values, and the share of tokens kept.

Keys, values and shares are scored separately, and any three combine to a choice for a layer.
Decides which formats and shares there are.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..keep import Budget, Keep, Observation
from ..recipe.geometry import Geometry
from ..recipe.spec import Protect, Recipe
from ..store import Format, Packed, Store, Transform

SINKS = 4  # first tokens that stay exact: they cost little, and most models attend to them
OBSERVED = 32  # queries of the prompt that score its tokens, as in SnapKV
SHARES = (1.0, 0.75, 0.5, 0.3, 0.15)
EXACT = "exact"
_ROTATED = Transform(rotate=True)
FORMATS: dict[str, dict[str, Format | None]] = {
    "keys": {
        EXACT: None,
        **{f"kivi-{bits}": Packed(bits, "channel", 32, residual=32) for bits in (2, 3, 4, 8)},
        **{f"turbo-{bits}": Packed(bits, "token", 0, transform=_ROTATED) for bits in (2, 3, 4)},
    },
    "values": {
        EXACT: None,
        **{f"kivi-{bits}": Packed(bits, "token", 32) for bits in (2, 3, 4, 8)},
        **{f"turbo-{bits}": Packed(bits, "token", 0, transform=_ROTATED) for bits in (2, 3, 4)},
    },
}
"""The formats of keys and of values by name: KIVI's, TurboQuant's, and exact."""


class Choice(NamedTuple):
    """The formats of a layer, by their names in `FORMATS`, and the share of the prompt it keeps."""

    keys: str = EXACT
    values: str = EXACT
    share: float = 1.0

    def __str__(self) -> str:
        return f"{self.keys}/{self.values}/{self.share:g}"

    @property
    def changes(self) -> tuple[Choice, Choice, Choice]:
        """The choices that change its keys, its values and its share alone."""
        return Choice(keys=self.keys), Choice(values=self.values), Choice(share=self.share)


def single(geometry: Geometry) -> list[Choice]:
    """Return the choices to score: the exact one, and those that change one thing."""
    found = [
        Choice(),
        *(Choice(keys=name) for name in FORMATS["keys"] if name != EXACT),
        *(Choice(values=name) for name in FORMATS["values"] if name != EXACT),
        *(Choice(share=share) for share in SHARES if share < 1),
    ]
    return [choice for choice in found if not uniform(choice, 0).problems(geometry)]


def combined(geometry: Geometry) -> list[Choice]:
    """Return all that a layer of this model can be."""
    scored = set(single(geometry))
    return [
        choice
        for choice in itertools.starmap(Choice, itertools.product(*FORMATS.values(), SHARES))
        if scored.issuperset(choice.changes)
    ]


def parts(choice: Choice, window: int) -> dict[str, Any]:
    """Return `keep` and `store` of a choice; window: the newest tokens, which stay exact."""
    keep = None
    if choice.share < 1:
        budget = Budget(fraction=choice.share, recent=max(OBSERVED, window))
        keep = Keep(budget, Observation(OBSERVED), when="prompt")
    formats = FORMATS["keys"][choice.keys], FORMATS["values"][choice.values]
    return {"keep": keep, "store": Store(*formats)}


def uniform(choice: Choice, window: int) -> Recipe:
    """Return the recipe whose layers all have this choice."""
    return Recipe(**parts(choice, window), protect=Protect(SINKS, window), name=str(choice))
