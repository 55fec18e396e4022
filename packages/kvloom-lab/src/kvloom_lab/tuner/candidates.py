"""What a layer can be: a format of its keys, a format of its values, and the tokens that it keeps.

The three are scored separately, and any three combine to a choice for a layer. This module lists
the formats and kept tokens, and makes the recipe of layers with different choices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from kvloom.keep import Budget, Keep, Observation, Reconstruction, Scorer
from kvloom.recipe import Geometry, LayerOverride, Protect, Recipe
from kvloom.store import Format, Packed, Store

SINKS = 4  # first tokens that always stay: they cost little, and most models attend to them
OBSERVED = 32  # queries of the prompt that score its tokens, as in SnapKV
CERTAIN = 0.2  # share of its uniform budget that every head keeps of the best tokens
SCORED_GROUP = 64  # tokens of a channel of rotated keys that share a scale, in scores
GROUP = 32  # the same in recipes, where 4 bits lose less
RECENTS = OBSERVED, 128  # newest tokens that eviction spares; the second where they are few
EXACT = "exact"
ALL = "all"
FORMATS: dict[str, dict[str, Format | None]] = {
    "keys": {
        EXACT: None,
        "kivi-8": Packed(8, "channel", 32, residual=32),
        **{
            f"rotated-{bits}": Packed(
                bits, "channel", SCORED_GROUP, residual=SCORED_GROUP, rotation="head"
            )
            for bits in (2, 3, 4)
        },
    },
    "values": {
        EXACT: None,
        "kivi-8": Packed(8, "token", 32),
        **{f"turbo-{bits}": Packed(bits, "token", 0, rotation="group") for bits in (2, 3, 4)},
    },
}
"""The formats of keys and of values by name: exact, KIVI's, the same rotated, and TurboQuant's."""


class Kept(NamedTuple):
    """A share of the prompt, the score whose best tokens stay, and how heads share a budget."""

    share: float
    scorer: Scorer
    query_heads: str
    head_share: float | None = None


KEPT: dict[str, Kept | None] = {
    ALL: None,
    **{
        f"kvzip-{share:g}": Kept(share, Reconstruction(), "max", CERTAIN)
        for share in (0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
    },
    **{
        f"snapkv-{share:g}": Kept(share, Observation(OBSERVED), "mean")
        for share in (0.75, 0.5, 0.3, 0.15)
    },
}
"""The kept tokens by name: all, or a share by KVzip's score (heads compete), or by SnapKV's."""
OTHERS = "kvzip-0.5", "snapkv-0.5"  # what other layers keep while kept tokens are scored
JOINT: dict[str, Kept] = {
    f"joint-{share:g}": Kept(share, Reconstruction(), "max", CERTAIN)
    for share in (0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8)
}
"""Shares of the prompt by KVzip's score that all layers keep together. A layer with such a choice
keeps what it gets if the heads of all layers compete for such a budget."""


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
    tokens; all other layers have the choice `others`. An evicted token often survives in another
    layer, so `kept` is scored while the other layers evict, too.
    """

    formats: list[Choice]
    kept: list[Choice]
    others: Choice


def to_score(geometry: Geometry, repeats: bool = True) -> Scored:
    """Return the choices that fit a model; repeats: whether it can repeat a prompt, for KVzip.

    Tokens are kept by SnapKV's score only where KVzip's does not fit.
    """
    formats = [
        Choice(),
        *(Choice(keys=name) for name in FORMATS["keys"] if name != EXACT),
        *(Choice(values=name) for name in FORMATS["values"] if name != EXACT),
    ]

    def fits(choice: Choice) -> bool:
        kept = KEPT[choice.kept]
        possible = repeats or kept is None or not kept.scorer.repeats
        return possible and not uniform(choice, RecipeShape(0)).problems(geometry)

    others = next(choice for choice in (Choice(kept=name) for name in OTHERS) if fits(choice))
    score = others.kept.partition("-")[0]
    kept = [Choice(kept=name) for name in KEPT if name.startswith(score)]
    return Scored([choice for choice in formats if fits(choice)], [Choice(), *kept], others)


def combined(scored: Scored) -> list[Choice]:
    """Return all that a layer can be."""
    choices = itertools.starmap(Choice, itertools.product(*FORMATS.values(), KEPT))
    scored_choices = {*scored.formats, *scored.kept}
    return [choice for choice in choices if scored_choices.issuperset(choice.changes)]


def recents(context: int) -> list[int]:
    """Return how many of the newest tokens eviction spares: the second one in long contexts only.

    There, they are at most a sixteenth, so a budget has room for sinks and tokens with high scores.
    """
    few, many = RECENTS
    return [few, many] if 16 * many <= context else [few]


class RecipeShape(NamedTuple):
    """What the choices of layers leave open.

    window: the newest tokens, which stay exact. group: the tokens in a group of rotated keys.
    recent: the newest tokens that eviction spares. layers: "uniform": the heads of a layer compete;
    "joint": those of all layers.
    """

    window: int
    group: int = GROUP
    recent: int = OBSERVED
    layers: str = "uniform"


def parts(choice: Choice, shape: RecipeShape, share: float | None = None) -> dict[str, Any]:
    """Return `keep` and `store` of a choice; share: what the layer keeps (None: its choice's)."""
    keep, kept = None, (KEPT | JOINT)[choice.kept]
    if kept is not None:
        share = kept.share if share is None else share
        recent = max(shape.recent, shape.window)
        layers = "uniform" if kept.head_share is None else shape.layers
        budget = Budget(fraction=share, recent=recent, layers=layers, head_share=kept.head_share)
        keep = Keep(budget, kept.scorer, when="prompt", query_heads=kept.query_heads)
    keys = FORMATS["keys"][choice.keys]
    if isinstance(keys, Packed) and keys.rotation != "none":
        keys = replace(keys, group=shape.group, residual=shape.group)
    return {"keep": keep, "store": Store(keys, FORMATS["values"][choice.values])}


def uniform(choice: Choice, shape: RecipeShape, share: float | None = None) -> Recipe:
    """Return the recipe whose layers all have this choice; share: as for `parts`."""
    protect = Protect(SINKS, shape.window)
    return Recipe(**parts(choice, shape, share), protect=protect, name=str(choice))


def evicting(choice: Choice, shape: RecipeShape) -> Recipe:
    """Return the recipe of all layers but a scored one; their heads keep equally many tokens."""
    recipe = uniform(choice, shape)
    assert recipe.keep is not None
    budget = replace(recipe.keep.budget, head_share=None)
    return replace(recipe, keep=replace(recipe.keep, budget=budget))


def by_layer(
    choices: Sequence[Choice],
    layer_indices: Sequence[int],
    shape: RecipeShape,
    shares: Sequence[float | None] | None = None,
) -> Recipe:
    """Return the recipe with these choices of the layers with these indices, in order.

    shares: what each layer keeps of a prompt; None: what its choice says. The most frequent layer
    is the recipe's own; neighbours that are alike share an override.
    """
    kinds = list(zip(choices, shares or [None] * len(choices), strict=True))
    common = Counter(kinds).most_common(1)[0][0]
    common_recipe = uniform(common[0], shape, common[1])
    overrides = []
    for kind, run in groupby(zip(kinds, layer_indices, strict=True), key=lambda pair: pair[0]):
        layer_parts = parts(kind[0], shape, kind[1])
        changed = {
            name: part for name, part in layer_parts.items() if part != getattr(common_recipe, name)
        }
        if not changed:
            continue
        run_indices = [layer_index for _, layer_index in run]
        where = (
            f"{run_indices[0]}-{run_indices[-1]}" if len(run_indices) > 1 else f"{run_indices[0]}"
        )
        overrides.append(LayerOverride(where, **changed))
    return replace(common_recipe, layers=tuple(overrides), name="tuned")


UNIFORM = Choice("rotated-4", "turbo-4", next(iter(JOINT)))
"""What all layers have where they are the same, as in `small`; its share fills the bytes."""
FINENESS = 10_000  # a share is a whole number of these parts of the prompt


class LayerSizes(NamedTuple):
    """What bytes depend on besides a layer's choice: the model, a prompt's tokens, the shape."""

    geometry: Geometry
    context: int
    shape: RecipeShape

    def of(self, choices: Sequence[Choice], share: float | None = None) -> np.ndarray:
        """Return the bytes of one layer with each choice, int64 [choices].

        share: what the layer keeps; None: what the choice says.
        """
        single_layer = replace(self.geometry, layers=1, cached=None)
        sizes = [uniform(x, self.shape, share).nbytes(self.context, single_layer) for x in choices]
        return np.array(sizes, np.int64)

    def uniform(self, shares: Sequence[float]) -> int:
        """Return the bytes of all layers with `UNIFORM`; shares: what each layer keeps."""
        return sum(int(self.of([UNIFORM], share)[0]) for share in shares)

    def filling(self, nbytes: int) -> float:
        """Return the largest share with which uniform layers fit into `nbytes`; 0 if none does."""
        low, high = 0, FINENESS
        while low < high:
            middle = (low + high + 1) // 2
            size = self.uniform([middle / FINENESS]) * self.geometry.layers
            low, high = (middle, high) if size <= nbytes else (low, middle - 1)
        return low / FINENESS
