"""Figures of a recipe on a task: means over samples, 95% intervals, bytes, speed, Pareto fronts.

The lines are those of docs/reference/result-files.md; `results` writes and reads them. Samples that
share a context depend on each other, so intervals and verdicts are over contexts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist, fmean
from typing import Any

import numpy as np

from .sample import Task
from .tasks import TASKS

EXACT = "full"  # the recipe that keeps every token in the model's dtype
RESAMPLES = 2000
FLIPS = 10_000
FEWEST = 6  # contexts of an interval and of a verdict: with fewer, `chance` is never below 5%
_SEED = 0
PER_SAMPLE = {"perplexity": "nll"}
"""The score of a sample that a figure over all samples is computed from."""


@dataclass(frozen=True)
class Interval:
    """A mean, the bounds of its 95% interval (None: too few), and the samples that have a value."""

    mean: float
    low: float | None
    high: float | None
    samples: int


@dataclass(frozen=True)
class PairedDifference(Interval):
    """The difference of a recipe from `full` on the samples that both have.

    won, lost: samples with a better or a worse value. verdict: "better" or "worse" if `chance` is
    less than 5%, else "equal"; "too few" for fewer than `FEWEST` contexts.
    """

    won: int
    lost: int
    verdict: str


@dataclass(frozen=True)
class Figures:
    """The figures of one recipe on one task.

    samples: with scores. problems: samples without; problem: the reason of the first. kv_bytes,
    exact_bytes: means over samples. share: kv_bytes / exact_bytes. scores: name → interval;
    `perplexity`, exp of the mean `nll`, is added. over_full: name → difference from `full`; without
    `perplexity`. prefill_s: seconds of a prompt.
    decode_tokens_s: tokens per second in decoding. bits_per_value, tokens_read: means over samples.
    A figure that no sample has is None.
    """

    task: str
    recipe: str
    samples: int = 0
    problems: int = 0
    problem: str | None = None
    share: float | None = None
    kv_bytes: float | None = None
    exact_bytes: float | None = None
    scores: dict[str, Interval] = field(default_factory=dict)
    over_full: dict[str, PairedDifference] = field(default_factory=dict)
    prefill_s: float | None = None
    decode_tokens_s: float | None = None
    bits_per_value: float | None = None
    tokens_read: float | None = None


def higher_is_better(task: str, score: str) -> bool:
    """Return whether a larger value of this score of the task is better."""
    return PER_SAMPLE.get(score, score) not in task_class(task).lower_is_better


def main_score(task: str, scores: Sequence[str]) -> str:
    """Return the main score of the task: its usual one, else the first of `scores`."""
    usual = task_class(task).main_score
    return usual if usual in scores else scores[0]


def task_class(name: str) -> type[Task[Any]]:
    """Return the task; the base class for a data set that only kvpress has."""
    return TASKS.get(name, Task)


def bootstrap(values: Sequence[float], contexts: Sequence[Hashable] | None = None) -> Interval:
    """Return the mean of the finite values, and its 95% bootstrap interval.

    contexts: of each value; None: each has its own. Whole contexts are resampled. The interval is
    the expanded percentile interval of Hesterberg (arXiv:1411.5279), because plain percentiles are
    too narrow for few contexts. Fewer than `FEWEST` contexts have no interval. The same values
    always give the same interval: the seed is fixed.
    """
    sums, counts = _by_context(values, contexts)
    if not len(sums):
        raise ValueError("expected at least one finite value to average, received none")
    samples = int(counts.sum())
    mean = float(sums.sum() / samples)
    if len(sums) < FEWEST:
        return Interval(mean, None, None, samples)
    draws, tail = _draws(len(sums)), _tail(len(sums))
    low, high = np.quantile((draws @ sums) / (draws @ counts), [tail, 1 - tail])
    return Interval(mean, float(low), float(high), samples)


def paired_difference(
    differences: Sequence[float], higher: bool, contexts: Sequence[Hashable] | None = None
) -> PairedDifference:
    """Return the mean difference of paired samples, and whether it is larger than chance.

    higher: a larger value is better. contexts: as for `bootstrap`.
    """
    interval = bootstrap(differences, contexts)
    positive = sum(x > 0 for x in differences)
    negative = sum(x < 0 for x in differences)
    won, lost = (positive, negative) if higher else (negative, positive)
    verdict = "equal"
    if len(set(contexts or range(len(differences)))) < FEWEST:
        verdict = "too few"
    elif chance(differences, contexts) < 0.05:
        verdict = "better" if (interval.mean > 0) == higher else "worse"
    return PairedDifference(**vars(interval), won=won, lost=lost, verdict=verdict)


def chance(differences: Sequence[float], contexts: Sequence[Hashable] | None = None) -> float:
    """Return how often random signs of the contexts' sums give at least as large a total.

    This is the two-sided sign-flip test. Without shared contexts, and for scores that a sample
    passes or fails, it is McNemar's test. The bootstrap interval is no test: of few contexts that
    differ, it excludes 0 too often.
    """
    sums, _ = _by_context(differences, contexts)
    least = abs(sums.sum()) * (1 - 1e-9)  # equal totals differ by rounding
    return float(np.mean(np.abs(_signs(len(sums)) @ sums) >= least))


def _by_context(
    values: Sequence[float], contexts: Sequence[Hashable] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum and the number of the finite values of each context."""
    groups: dict[Hashable, list[float]] = {}
    for context, value in zip(contexts or range(len(values)), values, strict=True):
        if math.isfinite(value):
            groups.setdefault(context, []).append(value)
    by_context = [(math.fsum(group), len(group)) for group in groups.values()]
    sums, counts = np.asarray(by_context, dtype=float).reshape(-1, 2).T
    return sums, counts


@cache
def _draws(contexts: int) -> np.ndarray:
    """Return how often each resample has each context, [RESAMPLES, contexts]."""
    shares = np.full(contexts, 1 / contexts)
    draws = np.random.default_rng(_SEED).multinomial(contexts, shares, size=RESAMPLES)
    return draws.astype(float)


def _tail(contexts: int) -> float:
    """Return the share of resamples below the expanded percentile interval.

    Resampled means vary less than means do, and a spread that few contexts show varies itself: the
    interval is as many standard errors wide as Student's, whose quantile `t` is expanded in 1 / df.
    """
    z, df = NormalDist().inv_cdf(0.975), contexts - 1
    t = z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    return NormalDist().cdf(-t * math.sqrt(contexts / df))


@cache
def _signs(contexts: int) -> np.ndarray:
    """Return 1 or -1 for each context, [FLIPS, contexts]."""
    return np.random.default_rng(_SEED).choice([-1.0, 1.0], (FLIPS, contexts))


def summarize(lines: Iterable[Mapping[str, Any]]) -> list[Figures]:
    """Return the figures of each task and recipe, in the order of their first lines."""
    groups: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for line in lines:  # a later line of the same sample replaces an earlier one
        groups.setdefault((line["task"], line["recipe"]), {})[line["sample"]] = line
    return [
        _figures(task, recipe, by_sample, groups.get((task, EXACT), {}))
        for (task, recipe), by_sample in groups.items()
    ]


def _figures(
    task: str,
    recipe: str,
    by_sample: Mapping[str, Mapping[str, Any]],
    exact: Mapping[str, Mapping[str, Any]],
) -> Figures:
    done = {name: line for name, line in by_sample.items() if not line.get("problem")}
    problems = [line["problem"] for line in by_sample.values() if line.get("problem")]
    if not done:
        return Figures(task, recipe, 0, len(problems), problems[0])
    kv_bytes = fmean(line["kv_bytes"] for line in done.values())
    exact_bytes = fmean(line["exact_bytes"] for line in done.values())
    values = {score: _values(done, score) for score in _score_names(done)}
    scores = {
        score: bootstrap(list(found.values()), _contexts(task, found))
        for score, found in values.items()
        if found
    }
    over_full = {} if recipe == EXACT else paired_differences(task, done, exact)
    if "nll" in scores:
        scores = {"perplexity": _exp(scores["nll"]), **scores}
    seconds = [line.get("seconds") or {} for line in done.values()]
    prefills = [each["prefill"] for each in seconds if each.get("prefill") is not None]
    decode = sum(each.get("decode") or 0 for each in seconds)
    steps = sum(each.get("steps") or 0 for each in seconds)
    means = {name: _mean(done, name) for name in ("bits_per_value", "tokens_read")}
    return Figures(
        task, recipe, len(done), len(problems), problems[0] if problems else None,
        kv_bytes / exact_bytes if exact_bytes else None, kv_bytes, exact_bytes, scores, over_full,
        fmean(prefills) if prefills else None, steps / decode if steps and decode else None,
        **means,
    )  # fmt: skip


def paired_differences(
    task: str, lines: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]
) -> dict[str, PairedDifference]:
    """Return the difference of each score from another recipe's, on the samples that both have.

    lines, others: of the two recipes, by sample.
    """
    found = {}
    for score in _score_names(lines):
        own, other = _values(lines, score), _values(others, score)
        both = [name for name in own if name in other]
        if both:
            pairs = [own[name] - other[name] for name in both]
            higher = higher_is_better(task, score)
            found[score] = paired_difference(pairs, higher, _contexts(task, both))
    return found


def _contexts(task: str, samples: Iterable[str]) -> list[str]:
    """Return the name of each sample's context."""
    return [task_class(task).context_of(name) for name in samples]


def _score_names(lines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(x for line in lines.values() for x in line.get("scores") or ()))


def _mean(lines: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a number that a line may have; None if no line has it."""
    numbers = [line[name] for line in lines.values() if line.get(name) is not None]
    return fmean(numbers) if numbers else None


def _values(lines: Mapping[str, Mapping[str, Any]], score: str) -> dict[str, float]:
    """Return the finite values of a score by sample."""
    scores = {name: (line.get("scores") or {}).get(score) for name, line in lines.items()}
    return {name: x for name, x in scores.items() if x is not None and math.isfinite(x)}


def _exp(interval: Interval) -> Interval:
    """Return the exponential of an interval, at most the largest float."""
    ends = [
        None if end is None else math.exp(min(end, 700.0))
        for end in (interval.mean, interval.low, interval.high)
    ]
    return Interval(ends[0] or 0.0, ends[1], ends[2], interval.samples)


def pareto(points: Sequence[tuple[float | None, float | None]], higher: bool) -> list[int]:
    """Return the indices of the points on the Pareto front, by rising share.

    points: share of the exact bytes, and score; None: no figure. A point is on the front if no
    other one has at most its share and at least its score, with one of the two strictly better.
    """
    sign = 1.0 if higher else -1.0
    order = sorted(
        (share, -sign * score, i)
        for i, (share, score) in enumerate(points)
        if share is not None and score is not None
    )
    front: list[int] = []
    best: tuple[float, float] | None = None  # the share and the negated score of the last point
    for share, cost, i in order:
        if best is None or cost < best[1] or (share, cost) == best:
            front.append(i)
            best = share, cost
    return front
