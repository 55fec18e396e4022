"""Measure whole recipes, correct the predicted costs by them, and return the best one.

The scores of layers are measured one layer at a time and added. Together, layers may cost more or
less than their sum, and evicted tokens may interact otherwise than packed ones. Decides which
recipes are measured, and what their figures say about the costs of keys, values and kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvloom.errors import InputError
from kvloom.recipe import Recipe

from .bound import Bound
from .candidates import Choice
from .problem import PLAIN, Problem, Weights

ROUNDS = 2  # of one more recipe each
MOST_ROUNDS = 8  # where none has met a bound on quality yet
TIGHTER = 0.7  # the factor of the bound in each round where no recipe has met it
TRUST = 0.1  # in the sum of the scores, against a measured recipe
WEIGHTS = 0.1, 10  # the least and the largest weight of a part of the costs


@dataclass
class Measured:
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


def repair(problems: Sequence[Problem], bound: Bound, measure: Measure) -> list[Measured]:
    """Return recipes that were measured, the best one within the bound first.

    Raises `InputError` where no measured recipe is within the bound, as rounding may prevent.
    """
    measured: dict[Recipe, Measured] = {}

    def add(unsolved: Sequence[Problem], weights: Weights, margin: float = 1.0) -> None:
        solved = {}
        for problem in unsolved:
            knapsack = problem.knapsack(weights)
            items = bound.solve(knapsack, margin)
            if items is not None and not (problem.open and bound.wasted_by(knapsack)):
                choices = tuple(problem.choices[i] for i in items)
                solved[problem.recipe(choices)] = problem, choices
        new = [recipe for recipe in solved if recipe not in measured]
        for recipe, kl in zip(new, measure(new), strict=True):
            measured[recipe] = Measured(*solved[recipe], kl)

    add(problems, PLAIN)
    margin = 1.0
    for number in range(MOST_ROUNDS):
        best = min((x for x in measured.values() if x.problem.open), key=bound.rank)
        within = bound.met_by(best)
        if within and number >= ROUNDS:
            break
        margin = margin if within or number < ROUNDS else margin * TIGHTER
        before = len(measured)
        add([best.problem], _fitted(list(measured.values())), margin)
        if within and len(measured) == before:
            break
    best, *others = sorted(measured.values(), key=bound.rank)
    if not bound.met_by(best):
        raise InputError(
            f"no recipe that was measured is within {bound}; the nearest has kl={best.mean:.4g}: "
            "allow that much"
        )
    return [best, *others]


def _fitted(measured: Sequence[Measured]) -> Weights:
    """Return the weights that explain the measured recipes best, in relative terms."""
    rows = np.array([one.predicted.sum(axis=0) / max(one.mean, 1e-9) for one in measured])
    some = TRUST**0.5 * np.eye(3)
    a, b = np.vstack([rows, some]), np.concatenate([np.ones(len(rows)), some.sum(axis=1)])
    keys, values, kept = np.linalg.lstsq(a, b, rcond=None)[0].clip(*WEIGHTS)
    return float(keys), float(values), float(kept)
