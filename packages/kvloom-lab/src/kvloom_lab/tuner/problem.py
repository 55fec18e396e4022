"""Which layers get which choices: the bound, the choice as a knapsack, and whole recipes measured.

The scores of layers are measured one layer at a time and added. Some problems choose a share of the
prompt for each layer alone. Some start from a shared budget: the heads of all layers compete for
it, and each layer may also take its result for one of the next two larger budgets. Some have one
uniform recipe. All layers at once may cost more or less than their sum, so whole recipes are
measured, and correct the predicted costs of keys, values and kept tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kvloom.errors import InputError
from kvloom.recipe import Recipe

from .candidates import EXACT, KEPT, SCORED_GROUP, UNIFORM, Choice, LayerSizes, by_layer, combined
from .knapsack import Knapsack
from .scores import Scores


@dataclass(frozen=True)
class Bound:
    """A share of the exact cache's bytes, or a mean divergence `kl` in nats; one of the two.

    exact_nbytes: of the exact cache. fixed_nbytes: those of windows and states among them, which
    no choice changes.
    """

    share: float | None
    kl: float | None
    exact_nbytes: int
    fixed_nbytes: int = 0

    def __post_init__(self) -> None:
        if (self.share is None) == (self.kl is None):
            raise InputError(
                "give either --share (share=), such as 0.2, or --quality (kl=), such as kl=0.01"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise InputError(f"share={self.share:g} must be above 0 and at most 1")
        if self.kl is not None and not 0 < self.kl < math.inf:
            raise InputError(f"kl={self.kl:g} must be above 0: a mean divergence in nats")

    def __str__(self) -> str:
        return f"kl={self.kl:g}" if self.share is None else f"share={self.share:g}"

    @property
    def nbytes(self) -> int:
        """The most bytes of the layers that are tuned, where bytes are bounded."""
        assert self.share is not None
        return int(self.share * self.exact_nbytes) - self.fixed_nbytes

    def share_of(self, nbytes: int) -> float:
        """Return the share of the exact cache, where the layers that are tuned take `nbytes`."""
        return (nbytes + self.fixed_nbytes) / self.exact_nbytes

    def check(self, fewest: int) -> None:
        """Raise `InputError` if even the smallest recipe, of `fewest` bytes, is too large."""
        if self.share is not None and self.nbytes < fewest:
            smallest = math.ceil(1e4 * self.share_of(fewest)) / 1e4
            raise InputError(
                f"no recipe takes {self.share:.4g} of the exact cache's bytes at this context; "
                f"the nearest bound is share={smallest:.4f}"
            )

    def solve(self, knapsack: Knapsack, margin: float = 1.0) -> list[int] | None:
        """Return one item a layer; margin: a factor of the bound on `kl`.

        None where no items are within the bound.
        """
        if self.kl is None:
            return knapsack.within(self.nbytes)
        return knapsack.reaching(self.kl * margin)

    def leaves_slack(self, knapsack: Knapsack) -> bool:
        """Return whether even the largest items leave bytes unused."""
        return self.share is not None and knapsack.most < self.nbytes

    def satisfied_by(self, recipe: MeasuredRecipe) -> bool:
        """Return whether a measured recipe is within the bound."""
        return recipe.nbytes <= self.nbytes if self.kl is None else recipe.mean <= self.kl

    def rank(self, recipe: MeasuredRecipe) -> tuple[bool, float]:
        """Return a key that sorts measured recipes, the best first."""
        met = self.satisfied_by(recipe)
        return not met, recipe.nbytes if met and self.kl is not None else recipe.mean


Weights = tuple[float, float, float]
"""By how much the scores of keys, values and kept tokens count."""
PLAIN: Weights = (1.0, 1.0, 1.0)
JOINT_SHARES = 3  # neighbours among the joint shares, between which layers choose
NEAR_BOUND = 0.5, 1.1  # bytes of uniform layers with the first of them, as a share of the bound


def shrink_costs(costs: np.ndarray, choices: Sequence[Choice], nbytes: np.ndarray) -> np.ndarray:
    """Return costs [layers, choices] with less of the chance in them.

    choices: each changes one thing; nbytes int64 [choices]. A cost is the mean of what was measured
    in the layer and of the mean of all layers: few tokens are measured, and the knapsack would
    choose figures that are low by chance. Fewer bytes of the same kind never cost less.
    """
    steady = (costs + costs.mean(axis=0)) / 2
    for kind in range(len(Choice._fields)):
        rest = [i for i, x in enumerate(choices) if Choice()[kind] != x[kind] or x == Choice()]
        order = sorted(rest, key=lambda i: -nbytes[i])
        steady[:, order] = np.maximum.accumulate(steady[:, order], axis=1)
    return steady.clip(min=0)


Shares = Mapping[str, Sequence[float]]
"""What each layer keeps of a prompt, by the names in `JOINT`."""


class Costs(NamedTuple):
    """What choices that change one thing cost: values [layers, choices] in nats."""

    choices: list[Choice]
    values: np.ndarray

    def of(self, choices: Sequence[Choice], shares: Shares) -> np.ndarray:
        """Return what keys, values and kept tokens of choices cost, [layers, choices, 3]."""
        index = {choice: i for i, choice in enumerate(self.choices)}
        kept = {name: self._between(values) for name, values in shares.items()}
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
        self.choices, self.layer_indices = list(choices), sizes.geometry.layer_indices
        self.shape, self.shares = sizes.shape, shares
        columns = []
        for choice in choices:
            layer_shares = shares.get(choice.kept, [None] * sizes.geometry.layers)
            nbytes = {share: sizes.of([choice], share)[0] for share in set(layer_shares)}
            columns.append([nbytes[share] for share in layer_shares])
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
        return by_layer(choices, self.layer_indices, self.shape, shares)

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


def all_problems(
    scores: Scores, sizes: LayerSizes, shares: Mapping[int, Shares], nbytes: int | None = None
) -> list[Problem]:
    """Return the problems of a model.

    shares: by the number of the newest tokens that eviction spares; empty ones for a model without
    KVzip. nbytes: the most bytes: uniform recipes fill them, and shares with which 4 bits take much
    less or more are left out (None: there is no such bound). The first problem has the
    costs of `shrink_costs`.
    """
    measured = [scores.costs(i) for i in sizes.geometry.layer_indices]
    singles = list(measured[0])
    raw = np.array([[of_layer[choice] for choice in singles] for of_layer in measured])
    scored = sizes._replace(shape=sizes.shape._replace(group=SCORED_GROUP)).of(singles)
    costs = Costs(singles, raw)
    steady = Costs(singles, shrink_costs(raw, singles, scored))
    alone = combined(scores.scored)
    formats = dict.fromkeys((x.keys, x.values) for x in alone if EXACT not in x)
    low, high = NEAR_BOUND
    results = []
    for recent, shares_by_name in shares.items():
        layer_sizes = sizes._replace(shape=sizes.shape._replace(recent=recent))
        results += [Problem(alone, steady, layer_sizes, {}), Problem(alone, costs, layer_sizes, {})]
        names = list(shares_by_name)
        for i, name in enumerate(names):
            if nbytes is None or low < layer_sizes.uniform(shares_by_name[name]) / nbytes < high:
                levels = {x: shares_by_name[x] for x in names[i : i + JOINT_SHARES]}
                joint_choices = [Choice(*sides, level) for sides in formats for level in levels]
                results.append(Problem(joint_choices, costs, layer_sizes, levels))
        if names and nbytes is not None and (UNIFORM.keys, UNIFORM.values) in formats:
            joint = layer_sizes._replace(shape=layer_sizes.shape._replace(layers="joint"))
            share = joint.filling(nbytes)
            if share:
                same = {UNIFORM.kept: [share] * sizes.geometry.layers}
                results.append(Problem([UNIFORM], costs, joint, same))
    return results


ROUNDS = 2  # of one more recipe each
MOST_ROUNDS = 8  # where none has met a bound on quality yet
TIGHTER = 0.7  # the factor of the bound in each round where no recipe has met it
TRUST = 0.1  # in the sum of the scores, against a measured recipe
WEIGHTS = 0.1, 10  # the least and the largest weight of a part of the costs


@dataclass
class MeasuredRecipe:
    """A whole recipe: the choices that solve a problem, and its divergences fp32 [T]."""

    problem: Problem
    choices: tuple[Choice, ...]
    kl: Tensor

    @property
    def mean(self) -> float:
        """The mean divergence."""
        return self.kl.mean().item()

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.problem.recipe(self.choices)

    @property
    def nbytes(self) -> int:
        """The bytes after a prompt."""
        return self.problem.size(self.choices)

    @property
    def predicted(self) -> np.ndarray:
        """What keys, values and kept tokens of each layer cost by the scores, [layers, 3]."""
        return self.problem.costs(self.choices)


Measure = Callable[[Sequence[Recipe]], Iterable[Tensor]]
"""Returns the divergences of whole recipes."""


def repair(problems: Sequence[Problem], bound: Bound, measure: Measure) -> list[MeasuredRecipe]:
    """Return recipes that were measured, the best one within the bound first.

    Raises `InputError` where no measured recipe is within the bound, as rounding may prevent.
    """
    measured: dict[Recipe, MeasuredRecipe] = {}

    def add(unsolved: Sequence[Problem], weights: Weights, margin: float = 1.0) -> None:
        solved = {}
        for problem in unsolved:
            knapsack = problem.knapsack(weights)
            items = bound.solve(knapsack, margin)
            if items is not None and not (problem.open and bound.leaves_slack(knapsack)):
                choices = tuple(problem.choices[i] for i in items)
                solved[problem.recipe(choices)] = problem, choices
        new = [recipe for recipe in solved if recipe not in measured]
        for recipe, kl in zip(new, measure(new), strict=True):
            measured[recipe] = MeasuredRecipe(*solved[recipe], kl)

    add(problems, PLAIN)
    margin = 1.0
    for number in range(MOST_ROUNDS):
        best = min((x for x in measured.values() if x.problem.open), key=bound.rank)
        within = bound.satisfied_by(best)
        if within and number >= ROUNDS:
            break
        margin = margin if within or number < ROUNDS else margin * TIGHTER
        before = len(measured)
        add([best.problem], _fitted(list(measured.values())), margin)
        if within and len(measured) == before:
            break
    best, *others = sorted(measured.values(), key=bound.rank)
    if not bound.satisfied_by(best):
        raise InputError(
            f"no recipe that was measured is within {bound}; the nearest has kl={best.mean:.4g}: "
            "allow that much"
        )
    return [best, *others]


def _fitted(measured: Sequence[MeasuredRecipe]) -> Weights:
    """Return the weights that explain the measured recipes best, in relative terms."""
    rows = np.array([recipe.predicted.sum(axis=0) / max(recipe.mean, 1e-9) for recipe in measured])
    prior = TRUST**0.5 * np.eye(3)
    a, b = np.vstack([rows, prior]), np.concatenate([np.ones(len(rows)), prior.sum(axis=1)])
    keys, values, kept = np.linalg.lstsq(a, b, rcond=None)[0].clip(*WEIGHTS)
    return float(keys), float(values), float(kept)
