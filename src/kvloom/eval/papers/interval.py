"""Whether a difference is more than chance: bootstrap intervals over samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RESAMPLES = 4000
PERCENT = 95


class Interval(NamedTuple):
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def difference(a: np.ndarray, b: np.ndarray) -> Interval:
    """Return the mean of a - b [samples] and its 95% interval; samples are paired.

    The samples are drawn again with replacement; the same numbers are drawn in every run.
    """
    paired = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(paired), (RESAMPLES, len(paired)))
    means = paired[draws].mean(axis=1)
    low, high = np.percentile(means, [(100 - PERCENT) / 2, (100 + PERCENT) / 2])
    return Interval(float(paired.mean()), float(low), float(high))


def smaller(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether a is smaller than b: the whole interval of a - b lies below 0."""
    return difference(a, b).high < 0
