"""The choice of all layers as a knapsack: their bytes, and costs that add up.

Decides which problems there are. Some choose a share of the prompt for each layer alone. Some begin
with a share that all layers keep together: a layer keeps what it would win where the heads of all
layers compete for such a budget, or for one of the two next larger ones. Some have one uniform
recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvloom.recipe import Recipe

from .candidates import EXACT, KEPT, SCORED_GROUP, Choice, combined
from .knapsack import Knapsack
from .layers import by_layer
from .scores import Scores
from .sizes import UNIFORM, LayerSizes

Weights = tuple[float, float, float]
"""By how much the scores of keys, values and kept tokens count."""
PLAIN: Weights = (1.0, 1.0, 1.0)
JOINT_SHARES = 3  # neighbours among the joint shares, between which layers choose
NEAR_BOUND = 0.5, 1.1  # bytes of uniform layers with the first of them, as a share of the bound


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


Shares = Mapping[str, Sequence[float]]
"""What each layer keeps of a prompt, by the names in `JOINT`."""


class Costs(NamedTuple):
    """What choices that change one thing cost: values [layers, choices] in nats."""

    choices: list[Choice]
    values: np.ndarray

    def of(self, choices: Sequence[Choice], shares: Shares) -> np.ndarray:
        """Return what keys, values and kept tokens of choices cost, [layers, choices, 3]."""
        index = {choice: i for i, choice in enumerate(self.choices)}
        kept = {name: self._between(its) for name, its in shares.items()}
        columns = [
            kept[x.kept] if x.kept in kept else self.values[:, index[x]]
            for choice in choices
            for x in choice.changes
        ]
        return np.stack(columns, axis=1).reshape(len(self.values), len(choices), 3)

    def _between(self, shares: Sequence[float]) -> np.ndarray:
        """Return what it costs if each layer keeps its share, between those that are scored."""
        kept = {1.0: Choice()}
        for choice in self.choices:
            tokens = KEPT[choice.kept]
            if tokens is not None:
                kept[tokens.share] = choice
        known = sorted(kept)
        columns = [self.choices.index(kept[share]) for share in known]
        rows = zip(shares, self.values[:, columns], strict=True)
        return np.array([np.interp(share, known, row) for share, row in rows])


class Problem:
    """The choices of a model's layers, their bytes at a context, and what they cost.

    choices: all that a layer can be. shares: of the choices whose kept tokens are in `JOINT`.
    """

    def __init__(
        self, choices: Sequence[Choice], costs: Costs, sizes: LayerSizes, shares: Shares
    ) -> None:
        self.choices, self.numbers = list(choices), sizes.geometry.numbers
        self.shape, self.shares = sizes.shape, shares
        columns = []
        for choice in choices:
            its = shares.get(choice.kept, [None] * sizes.geometry.layers)
            nbytes = {share: sizes.of([choice], share)[0] for share in set(its)}
            columns.append([nbytes[share] for share in its])
        self.nbytes = np.array(columns).T
        """Of each choice in each layer, int64 [layers, choices]."""
        self.parts = costs.of(choices, shares)
        """What keys, values and kept tokens of each choice cost: [layers, choices, 3]."""

    def knapsack(self, weights: Weights = PLAIN) -> Knapsack:
        """Return the knapsack in which these parts of a choice's cost count so much."""
        return Knapsack(self.nbytes, self.parts @ np.array(weights))

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.choices) > 1

    def recipe(self, choices: Sequence[Choice]) -> Recipe:
        """Return the recipe with one choice a layer."""
        shares = [self.shares[x.kept][i] if x.kept in self.shares else None
                  for i, x in enumerate(choices)]  # fmt: skip
        return by_layer(choices, self.numbers, self.shape, shares)

    def costs(self, choices: Sequence[Choice]) -> np.ndarray:
        """Return what keys, values and kept tokens of one choice a layer cost, [layers, 3]."""
        items = self._items(choices)
        return self.parts[range(len(items)), items]

    def size(self, choices: Sequence[Choice]) -> int:
        """Return the bytes of one choice a layer together."""
        items = self._items(choices)
        return int(self.nbytes[range(len(items)), items].sum())

    def _items(self, choices: Sequence[Choice]) -> list[int]:
        return [self.choices.index(choice) for choice in choices]


def problems(
    scores: Scores, sizes: LayerSizes, shares: Mapping[int, Shares], nbytes: int | None = None
) -> list[Problem]:
    """Return the problems of a model.

    shares: by the number of the newest tokens that eviction spares; empty ones for a model without
    KVzip. nbytes: the most bytes: uniform recipes fill them, and shares with which 4 bits take much
    less or more are left out (None: there is no such bound). The first problem has the steadied
    costs.
    """
    measured = [scores.costs(number) for number in sizes.geometry.numbers]
    singles = list(measured[0])
    raw = np.array([[of_layer[choice] for choice in singles] for of_layer in measured])
    scored = sizes._replace(shape=sizes.shape._replace(group=SCORED_GROUP)).of(singles)
    costs = Costs(singles, raw)
    steady = Costs(singles, steadied(raw, singles, scored))
    alone = combined(scores.scored)
    formats = dict.fromkeys((x.keys, x.values) for x in alone if EXACT not in x)
    low, high = NEAR_BOUND
    results = []
    for recent, shares_by_name in shares.items():
        own = sizes._replace(shape=sizes.shape._replace(recent=recent))
        results += [Problem(alone, steady, own, {}), Problem(alone, costs, own, {})]
        names = list(shares_by_name)
        for i, name in enumerate(names):
            if nbytes is None or low < own.uniform(shares_by_name[name]) / nbytes < high:
                levels = {x: shares_by_name[x] for x in names[i : i + JOINT_SHARES]}
                together = [Choice(*sides, level) for sides in formats for level in levels]
                results.append(Problem(together, costs, own, levels))
        if names and nbytes is not None and (UNIFORM.keys, UNIFORM.values) in formats:
            joint = own._replace(shape=own.shape._replace(layers="joint"))
            share = joint.filling(nbytes)
            if share:
                same = {UNIFORM.kept: [share] * sizes.geometry.layers}
                results.append(Problem([UNIFORM], costs, joint, same))
    return results
