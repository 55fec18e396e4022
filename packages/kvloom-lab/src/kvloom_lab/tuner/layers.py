"""The recipe of a model whose layers have different choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from kvloom.recipe import LayerOverride, Recipe

from .candidates import Choice, RecipeShape, parts, uniform


def by_layer(
    choices: Sequence[Choice],
    numbers: Sequence[int],
    shape: RecipeShape,
    shares: Sequence[float | None] | None = None,
) -> Recipe:
    """Return the recipe with these choices of the layers `numbers`, in order.

    shares: what each layer keeps of a prompt; None: what its choice says. The most frequent layer
    is the recipe's own; neighbours that are alike share an override.
    """
    kinds = list(zip(choices, shares or [None] * len(choices), strict=True))
    common = Counter(kinds).most_common(1)[0][0]
    own = uniform(common[0], shape, common[1])
    overrides = []
    for kind, run in groupby(zip(kinds, numbers, strict=True), key=lambda pair: pair[0]):
        given = parts(kind[0], shape, kind[1])
        changed = {name: part for name, part in given.items() if part != getattr(own, name)}
        if not changed:
            continue
        run_numbers = [number for _, number in run]
        where = (
            f"{run_numbers[0]}-{run_numbers[-1]}" if len(run_numbers) > 1 else f"{run_numbers[0]}"
        )
        overrides.append(LayerOverride(where, **changed))
    return replace(own, layers=tuple(overrides), name="tuned")
