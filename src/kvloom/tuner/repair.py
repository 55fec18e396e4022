"""Correct the predicted cost of whole recipes by measuring some.

The scores of layers are measured one layer at a time and added. Together, layers may cost more or
less than their sum, and evicted tokens may interact otherwise than packed ones. Decides which
recipes are measured, and what their figures say about the costs of keys, values and kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..errors import InputError
from .bound import Bound
from .candidates import Choice
from .problem import PLAIN, Problem, Weights

FIRST: tuple[Weights, ...] = (PLAIN, (1.0, 1.0, 4.0), (1.0, 1.0, 16.0))
ROUNDS = 3  # of one more recipe each
MOST_ROUNDS = 8  # where none has met a bound on quality yet
TRUST = 0.1  # in the sum of the scores, against a measured recipe


@dataclass
class Measured:
    """A whole recipe: its choices, its divergences fp32 [T], and its bytes after a prompt.

    predicted: the sum of its layers' scores.
    """

    choices: tuple[Choice, ...]
    predicted: float
    kl: Tensor
    nbytes: int

    @property
    def mean(self) -> float:
        """The mean divergence."""
        return self.kl.mean().item()


Measure = Callable[[Sequence[tuple[Choice, ...]]], Iterable[Tensor]]
"""Returns the divergences of whole recipes."""


def repair(problem: Problem, bound: Bound, measure: Measure) -> list[Measured]:
    """Return recipes that were measured, the best one within the bound first.

    Raises `InputError` where no measured recipe is within the bound, as rounding may prevent.
    """
    found: dict[tuple[Choice, ...], Measured] = {}

    def add(weights: Sequence[Weights], margin: float = 1.0) -> None:
        solved = [bound.solve(problem.knapsack(w), margin) for w in weights]
        new = [tuple(problem.choices[i] for i in items) for items in solved]
        new = [choices for choices in dict.fromkeys(new) if choices not in found]
        for choices, kl in zip(new, measure(new), strict=True):
            predicted, nbytes = problem.costs(choices).sum(), problem.size(choices)
            found[choices] = Measured(choices, predicted, kl, nbytes)

    add(FIRST)
    margin = 1.0
    for number in range(MOST_ROUNDS):
        within = any(bound.met_by(one) for one in found.values())
        if within and number >= ROUNDS:
            break
        margin = margin if within or number < ROUNDS else margin * 0.7
        before = len(found)
        add([_fitted(problem, list(found.values()))], margin)
        if within and len(found) == before:
            break
    best = sorted(found.values(), key=bound.rank)
    if not bound.met_by(best[0]):
        nearest = min(one.mean for one in best)
        raise InputError(
            f"no recipe that was measured is within {bound}; the nearest has kl={nearest:.4g}: "
            "allow that much"
        )
    return best


def _fitted(problem: Problem, measured: Sequence[Measured]) -> Weights:
    """Return the weights that explain the measured recipes best, in relative terms."""
    rows = np.array([problem.costs(one.choices) / max(one.mean, 1e-9) for one in measured])
    some = TRUST**0.5 * np.eye(3)
    a, b = np.vstack([rows, some]), np.concatenate([np.ones(len(rows)), some.sum(axis=1)])
    keys, values, kept = np.linalg.lstsq(a, b, rcond=None)[0].clip(0.1, 10)
    return float(keys), float(values), float(kept)
