"""The recipe of a model whose layers have different choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ..recipe.spec import LayerOverride, Recipe
from .candidates import Choice, parts, uniform


def by_layer(choices: Sequence[Choice], numbers: Sequence[int], window: int) -> Recipe:
    """Return the recipe with these choices of the layers `numbers`, in order.

    The most frequent choice is the recipe's own; neighbours with another one share an override.
    """
    common = Counter(choices).most_common(1)[0][0]
    own = uniform(common, window)
    overrides = []
    for choice, run in groupby(zip(choices, numbers, strict=True), key=lambda pair: pair[0]):
        if choice == common:
            continue
        places = [number for _, number in run]
        given = parts(choice, window)
        changed = {name: part for name, part in given.items() if part != getattr(own, name)}
        where = f"{places[0]}-{places[-1]}" if len(places) > 1 else f"{places[0]}"
        overrides.append(LayerOverride(where, **changed))
    return replace(own, layers=tuple(overrides), name="tuned")
