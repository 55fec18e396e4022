"""Whether a difference is more than chance: bootstrap intervals over samples."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..summary import bootstrap


class Interval(NamedTuple):
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def difference(a: np.ndarray, b: np.ndarray) -> Interval:
    """Return the mean of a - b [samples] and its 95% interval; samples are paired.

    One sample has the interval of its own value.
    """
    paired = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    found = bootstrap(paired.tolist())
    if found.low is None or found.high is None:
        return Interval(found.mean, found.mean, found.mean)
    return Interval(found.mean, found.low, found.high)
