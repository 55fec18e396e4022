"""Tables of measured quality, and the rules that several claims share.

Papers judge by task scores, which a small model does not reach. Here a recipe is better than
another if its predictions diverge less from those of the exact cache (KL divergence), by more than
chance: the 95% bootstrap interval of the paired difference over samples excludes 0. "Keeps the
quality" means a perplexity of at most 5% above that of the exact cache, "as good" at most 1%.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..eval.summary import bootstrap
from .claim import ClaimTable, Finding, NotTestable
from .lab import Quality

KEEPS = 1.05
AS_GOOD = 1.01
LEAST_FOUND = 0.5
WITHIN_CHANCE = (
    "the order is the paper's, but an interval includes 0: there are too few samples to tell it "
    "from chance, or the effect is small on this model"
)
COLUMNS = ("perplexity / full", "KL (nats)", "agrees", "bytes / full")


class Difference(NamedTuple):
    """A mean of paired differences, and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Return the mean of a - b [samples] and its 95% interval; samples are paired.

    One sample has the interval of its own value.
    """
    paired = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    interval = bootstrap(paired.tolist())
    if interval.low is None or interval.high is None:
        return Difference(interval.mean, interval.mean, interval.mean)
    return Difference(interval.mean, interval.low, interval.high)


def quality_figures(found: Mapping[str, Quality]) -> ClaimTable:
    """Return one row a recipe."""
    rows = {
        name: (q.ratio, float(q.kl.mean()), q.agreement, q.bytes_share) for name, q in found.items()
    }
    return ClaimTable(COLUMNS, rows)


def ordered(found: Mapping[str, Quality], *pairs: tuple[str, str]) -> Finding:
    """Return whether the first recipe of every pair is better than the second."""
    intervals = [(a, b, difference(found[a].kl, found[b].kl)) for a, b in pairs]
    evidence = "; ".join(f"KL of {a} minus {b}: {x}" for a, b, x in intervals)
    chance = all(x.mean < 0 for *_, x in intervals)
    return Finding(
        quality_figures(found),
        all(x.high < 0 for *_, x in intervals),
        evidence,
        WITHIN_CHANCE if chance else "",
    )


def kept(found: Mapping[str, Quality], limits: Mapping[str, float]) -> Finding:
    """Return whether each recipe's perplexity over that of `full` is at most its limit."""
    holds = all(found[name].ratio <= limit for name, limit in limits.items())
    evidence = "; ".join(
        f"{name}: {found[name].ratio:.3f} (limit {limit:g})" for name, limit in limits.items()
    )
    return Finding(quality_figures(found), holds, evidence)


def all_hold(*findings: Finding) -> Finding:
    """Return one finding of several about the same figures: it holds if all do."""
    failed = [f for f in findings if not f.holds]
    by_chance = failed and all(f.why_not_reproduced == WITHIN_CHANCE for f in failed)
    return Finding(
        findings[0].ours,
        not failed,
        "; ".join(f.evidence for f in findings),
        WITHIN_CHANCE if by_chance else "",
    )


def monotone(found: Mapping[str, Quality], names: Sequence[str]) -> Finding:
    """Return whether every recipe is better than the one before it."""
    return ordered(found, *((b, a) for a, b in pairwise(names)))


def shares(found: Mapping[str, np.ndarray]) -> ClaimTable:
    """Return the share of correct answers of each recipe."""
    rows = {name: (float(x.mean()), float(len(x))) for name, x in found.items()}
    return ClaimTable(("found", "questions"), rows)


def require_retrieval(found: Mapping[str, np.ndarray]) -> None:
    """Raise `NotTestable` if the exact cache answers less than half of the questions."""
    full = float(found["full"].mean())
    if full < LEAST_FOUND:
        raise NotTestable(
            f"with its exact cache this model answers {full:.0%} of the questions; a model that "
            f"answers at least {LEAST_FOUND:.0%} is needed"
        )
