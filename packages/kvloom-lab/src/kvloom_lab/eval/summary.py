"""Figures of a recipe on a task: means over samples, 95% intervals, bytes, speed, Pareto fronts.

The lines are those of docs/reference/result-files.md; `results` writes and reads them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np

from .sample import Task
from .tasks import TASKS

EXACT = "full"  # the recipe that keeps every token in the model's dtype
RESAMPLES = 2000
_SEED = 0
PER_SAMPLE = {"perplexity": "nll"}
"""The score of a sample that a figure over all samples is computed from."""


@dataclass(frozen=True)
class Interval:
    """A mean, the bounds of its 95% interval (None: unknown), and the samples that have a value."""

    mean: float
    low: float | None
    high: float | None
    samples: int


@dataclass(frozen=True)
class PairedDifference(Interval):
    """The difference of a recipe from `full` on the samples that both have.

    won, lost: samples with a better or a worse value. verdict: "better" or "worse" if chance alone
    explains the difference in less than 5% of cases, else "equal". Scores that a sample passes or
    fails are tested by McNemar's exact test, others by the interval.
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


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the mean of the finite values, and its 95% percentile bootstrap interval.

    The same values always give the same interval: the seed is fixed. One value has no interval.
    """
    finite = np.asarray([value for value in values if math.isfinite(value)], dtype=float)
    if not len(finite):
        raise ValueError("expected at least one finite value to average, received none")
    mean = float(finite.mean())
    if len(finite) == 1:
        return Interval(mean, None, None, 1)
    low, high = np.quantile(_weights(len(finite)) @ finite, [0.025, 0.975])
    return Interval(mean, float(low), float(high), len(finite))


def paired_difference(differences: Sequence[float], higher: bool) -> PairedDifference:
    """Return the mean difference of paired samples, and whether it is larger than chance.

    higher: a larger value is better.
    """
    interval = bootstrap(differences)
    positive = sum(x > 0 for x in differences)
    negative = sum(x < 0 for x in differences)
    won, lost = (positive, negative) if higher else (negative, positive)
    if set(differences) <= {-1.0, 0.0, 1.0}:
        differs = mcnemar(won, lost) < 0.05
    else:
        low, high = interval.low, interval.high
        differs = low is not None and high is not None and (low > 0 or high < 0)
    verdict = "equal"
    if differs:
        verdict = "better" if (interval.mean > 0) == higher else "worse"
    return PairedDifference(**vars(interval), won=won, lost=lost, verdict=verdict)


def mcnemar(won: int, lost: int) -> float:
    """Return the two-sided p of McNemar's exact test on samples whose outcomes differ."""
    trials = won + lost
    tail = sum(math.comb(trials, k) for k in range(min(won, lost) + 1)) / 2**trials
    return min(1.0, 2 * tail)


@cache
def _weights(samples: int) -> np.ndarray:
    """Return the share of each sample in each resample, [RESAMPLES, samples]."""
    counts = np.random.default_rng(_SEED).multinomial(
        samples, np.full(samples, 1 / samples), size=RESAMPLES
    )
    return counts / samples


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
    scores, over_full = {}, {}
    for score in dict.fromkeys(name for line in done.values() for name in line["scores"]):
        values = _values(done, score)
        if not values:
            continue
        scores[score] = bootstrap(list(values.values()))
        other = _values(exact, score)
        pairs = [value - other[name] for name, value in values.items() if name in other]
        if pairs and recipe != EXACT:
            over_full[score] = paired_difference(pairs, higher_is_better(task, score))
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
