"""What a layer can be: a format of its keys, a format of its values, and the tokens that it keeps.

The three are scored separately, and any three combine to a choice for a layer. Decides which
formats and which kept tokens there are.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..keep import Budget, Keep, Observation, Reconstruction, Scorer
from ..recipe.geometry import Geometry
from ..recipe.spec import Protect, Recipe
from ..store import Format, Packed, Store, Transform

SINKS = 4  # first tokens that stay exact: they cost little, and most models attend to them
OBSERVED = 32  # queries of the prompt that score its tokens, as in SnapKV
EXACT = "exact"
ALL = "all"
_TURBO = Transform(rotate=True)
_ROTATED = Transform(hadamard=True)
FORMATS: dict[str, dict[str, Format | None]] = {
    "keys": {
        EXACT: None,
        **{f"kivi-{bits}": Packed(bits, "channel", 32, residual=32) for bits in (2, 4, 8)},
        **{
            f"rotated-{bits}": Packed(bits, "channel", 64, residual=64, transform=_ROTATED)
            for bits in (2, 3, 4)
        },
        "turbo-3": Packed(3, "token", 0, transform=_TURBO),
    },
    "values": {
        EXACT: None,
        **{f"kivi-{bits}": Packed(bits, "token", 32) for bits in (2, 4, 8)},
        **{f"turbo-{bits}": Packed(bits, "token", 0, transform=_TURBO) for bits in (2, 3, 4)},
    },
}
"""The formats of keys and of values by name: exact, KIVI's, the same rotated, and TurboQuant's."""


class Kept(NamedTuple):
    """A share of the prompt, and the score whose best tokens stay."""

    share: float
    scorer: Scorer
    group: str


SHARES = {"snapkv": (0.5, 0.3, 0.15), "kvzip": (0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)}
_SCORES = {"snapkv": (Observation(OBSERVED), "mean"), "kvzip": (Reconstruction(), "max")}
KEPT: dict[str, Kept | None] = {
    ALL: None,
    **{
        f"{name}-{share:g}": Kept(share, *score)
        for name, score in _SCORES.items()
        for share in SHARES[name]
    },
}
"""The kept tokens by name: all, or a share by SnapKV's or by KVzip's score."""
OTHERS = "kvzip-0.5", "snapkv-0.5"  # the first one that fits the model


class Choice(NamedTuple):
    """The formats of a layer and its kept tokens, by their names in `FORMATS` and `KEPT`."""

    keys: str = EXACT
    values: str = EXACT
    kept: str = ALL

    def __str__(self) -> str:
        return "/".join(self)

    @property
    def changes(self) -> tuple[Choice, Choice, Choice]:
        """The choices that change its keys, its values and its kept tokens alone."""
        return Choice(keys=self.keys), Choice(values=self.values), Choice(kept=self.kept)


class Scored(NamedTuple):
    """The choices to score. The first one of each list is exact, and what others compare with.

    formats: change the keys or the values; all other layers are exact. kept: change the kept
    tokens, while all other layers keep `OTHERS`: what a layer evicts is often found in another
    one, as long as that one evicts nothing.
    """

    formats: list[Choice]
    kept: list[Choice]


def to_score(geometry: Geometry, repeats: bool = True) -> Scored:
    """Return the choices that fit a model; repeats: whether it can repeat a prompt, for KVzip."""
    formats = [
        Choice(),
        *(Choice(keys=name) for name in FORMATS["keys"] if name != EXACT),
        *(Choice(values=name) for name in FORMATS["values"] if name != EXACT),
    ]
    scorers = {name: kept.scorer for name, kept in KEPT.items() if kept is not None}
    kept = [Choice(kept=name) for name, x in scorers.items() if repeats or not x.repeats]
    fits = [choice for choice in formats if not uniform(choice, 0).problems(geometry)]
    return Scored(fits, [Choice(), *kept])


def others(scored: Scored) -> Choice:
    """Return the choice of all other layers while kept tokens are scored."""
    return Choice(kept=next(name for name in OTHERS if Choice(kept=name) in scored.kept))


def combined(scored: Scored) -> list[Choice]:
    """Return all that a layer can be."""
    every = itertools.starmap(Choice, itertools.product(*FORMATS.values(), KEPT))
    one = {*scored.formats, *scored.kept}
    return [choice for choice in every if one.issuperset(choice.changes)]


def parts(choice: Choice, window: int) -> dict[str, Any]:
    """Return `keep` and `store` of a choice; window: the newest tokens, which stay exact."""
    keep, kept = None, KEPT[choice.kept]
    if kept is not None:
        budget = Budget(fraction=kept.share, recent=max(OBSERVED, window))
        keep = Keep(budget, kept.scorer, when="prompt", group=kept.group)
    formats = FORMATS["keys"][choice.keys], FORMATS["values"][choice.values]
    return {"keep": keep, "store": Store(*formats)}


def uniform(choice: Choice, window: int) -> Recipe:
    """Return the recipe whose layers all have this choice."""
    return Recipe(**parts(choice, window), protect=Protect(SINKS, window), name=str(choice))
