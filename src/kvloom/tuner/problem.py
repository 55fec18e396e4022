"""The choice of all layers as a knapsack: their bytes, and costs that add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..recipe.geometry import Geometry
from .candidates import Choice, combined, uniform
from .knapsack import Knapsack
from .scores import Scores

Weights = tuple[float, float, float]
"""By how much the scores of keys, values and kept tokens count."""
PLAIN: Weights = (1.0, 1.0, 1.0)


def sizes(choices: Sequence[Choice], geometry: Geometry, context: int, window: int) -> np.ndarray:
    """Return the bytes of one layer with each choice after `context` tokens, int64 [choices]."""
    one = replace(geometry, layers=1, layer_numbers=None)
    return np.array([uniform(x, window).nbytes(context, one) for x in choices], np.int64)


def steadied(costs: np.ndarray, choices: Sequence[Choice], nbytes: np.ndarray) -> np.ndarray:
    """Return costs [layers, choices] with less of the chance in them.

    choices: each changes one thing; nbytes int64 [choices]. A cost is the mean of what was measured
    in the layer and of the mean of all layers: few tokens are measured, and the knapsack would
    choose the luckiest of many figures. Fewer bytes of the same kind never cost less.
    """
    found = (costs + costs.mean(axis=0)) / 2
    for kind in range(len(Choice._fields)):
        rest = [i for i, x in enumerate(choices) if Choice()[kind] != x[kind] or x == Choice()]
        order = sorted(rest, key=lambda i: -nbytes[i])
        found[:, order] = np.maximum.accumulate(found[:, order], axis=1)
    return found.clip(min=0)


class Problem:
    """The scores of a model's layers, and the bytes of every choice at a context.

    window: the newest tokens that stay exact. choices: all that a layer can be.
    """

    def __init__(self, scores: Scores, geometry: Geometry, context: int, window: int) -> None:
        self.choices = combined(scores.scored)
        one = sizes(self.choices, geometry, context, window)
        self.nbytes = np.tile(one, (geometry.layers, 1))
        measured = [scores.costs(number) for number in geometry.numbers]
        singles = list(measured[0])
        costs = np.array([[found[choice] for choice in singles] for found in measured])
        costs = steadied(costs, singles, sizes(singles, geometry, context, window))
        index = {choice: i for i, choice in enumerate(singles)}
        self.parts = np.stack(
            [costs[:, [index[x] for x in one.changes]] for one in self.choices], axis=1
        )
        """What keys, values and kept tokens of each choice cost: [layers, choices, 3]."""

    def knapsack(self, weights: Weights = PLAIN) -> Knapsack:
        """Return the knapsack in which these parts of a choice's cost count so much."""
        return Knapsack(self.nbytes, self.parts @ np.array(weights))

    def costs(self, choices: Sequence[Choice]) -> np.ndarray:
        """Return what keys, values and kept tokens of one choice a layer cost together, [3]."""
        items = self._items(choices)
        return self.parts[range(len(items)), items].sum(axis=0)

    def size(self, choices: Sequence[Choice]) -> int:
        """Return the bytes of one choice a layer together."""
        items = self._items(choices)
        return int(self.nbytes[range(len(items)), items].sum())

    def _items(self, choices: Sequence[Choice]) -> list[int]:
        return [self.choices.index(choice) for choice in choices]
