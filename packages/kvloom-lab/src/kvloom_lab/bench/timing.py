"""Time candidates alternately, so that other load on the machine affects all of them.

A time is the wall time of one call, without the compilation of kernels, after warm-up rounds that
are not counted.
"""

from __future__ import annotations

import signal
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import torch

from kvloom.kernels import operations_run

from ..workload import clock
from ..workload.errors import logged_line

WARM_UP = 3
"""Rounds that are not counted."""
_SLOW_S = 20.0  # a candidate whose counted calls took longer in total ...
_SLOW_CALLS = 3  # ... is left out of further rounds after this many of them


class TooSlow(BaseException):
    """Raised by `time_limit`, with the reason; not an `Exception`, which libraries catch."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise `TooSlow` in the work of this context after `seconds` seconds; None: no limit.

    what: the work, for the reason. A call into compiled code ends first. Without SIGALRM, as on
    Windows, and outside the main thread, there is no limit.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if seconds is None or not in_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow(
            f"skipped, because {what} takes more than {seconds:g} s; name it in --baselines to wait"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Candidate:
    """A function to time.

    call: one timed step. prepare: called before each step, not timed. kv_bytes, read_bytes: return
    the bytes of keys and values in the cache, and those that a step reads; called after all timing.
    limit_s: the most seconds of a call; None: no limit. problem: the reason why there are no times.
    ms: milliseconds of its calls. fallbacks: kvloom's operations that fell back, with reasons.
    """

    name: str
    call: Callable[[], object] | None = None
    prepare: Callable[[], object] | None = None
    kv_bytes: Callable[[], int | None] = field(default=lambda: None)
    read_bytes: Callable[[], int | None] = field(default=lambda: None)
    limit_s: float | None = None
    problem: str | None = None
    ms: list[float] = field(default_factory=list)
    fallbacks: set[str] = field(default_factory=set)


def built(name: str, build: Callable[[], list[Candidate]]) -> list[Candidate]:
    """Return the candidates that `build` makes, or one with the reason why it fails."""
    try:
        return build()
    except Exception as error:
        return [Candidate(name, problem=problem(error))]


def problem(error: BaseException) -> str:
    """Return why a candidate has no times."""
    return logged_line(error, "a candidate") if isinstance(error, Exception) else str(error)


def time_candidates(
    candidates: Sequence[Candidate],
    repeats: int,
    on_step: Callable[[str, int], None] | None = None,
    warm_up: int = WARM_UP,
) -> dict[str, Candidate]:
    """Time every candidate `repeats` times, alternately; slow ones less often. Return by name.

    on_step: called with the current candidate, and with one unit a round. If a call raises an
    error or exceeds its limit, the candidate has a `problem` and no times; the others continue.
    """
    slow: set[str] = set()
    with torch.inference_mode():
        for i in range(warm_up + repeats):
            for candidate in candidates:
                if candidate.call is None or candidate.name in slow:
                    continue
                if on_step:
                    on_step(candidate.name, 0)
                try:
                    with time_limit(candidate.limit_s, "a step"):
                        ms, fallbacks = _time(candidate)
                except (Exception, TooSlow) as error:
                    candidate.call, candidate.problem = None, problem(error)
                    candidate.ms, candidate.fallbacks = [], set()
                    continue
                if i >= warm_up:
                    candidate.ms.append(ms)
                    if len(candidate.ms) >= _SLOW_CALLS and sum(candidate.ms) > 1e3 * _SLOW_S:
                        slow.add(candidate.name)
                candidate.fallbacks |= fallbacks
            if on_step:
                on_step("", 1)
    return {candidate.name: candidate for candidate in candidates}


def _time(candidate: Candidate) -> tuple[float, set[str]]:
    """Return the milliseconds of a call, and the operations that fell back to the reference."""
    assert candidate.call is not None
    if candidate.prepare is not None:
        candidate.prepare()
    before = operations_run()
    begin = clock.seconds()
    candidate.call()
    ms = 1e3 * (clock.seconds() - begin)
    return ms, {
        f"{operation}: {reason}"
        for operation, backend, reason in operations_run() - before
        if backend == "ref"
    }


@dataclass
class TimedRow:
    """One candidate at one context.

    Attributes:
        name: Of the candidate.
        shape: Of the tensors, or the model.
        context: Tokens.
        batch: Rows.
        ms: Median of a call.
        least_ms: The fastest call.
        kv_bytes: Keys and values in the cache, with metadata and spare room.
        read_bytes: The least that a call must read.
        gb_s: `read_bytes` over `ms`.
        ratios: How many times faster than each reference this candidate is.
        fell: Operations of kvloom that fell back to plain torch, with the reason.
        problem: Why there are no figures.
    """

    name: str
    shape: str
    context: int
    batch: int
    ms: float | None = None
    least_ms: float | None = None
    kv_bytes: int | None = None
    read_bytes: int | None = None
    gb_s: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    fell: list[str] = field(default_factory=list)
    problem: str | None = None


def make_rows(
    candidates: Sequence[Candidate],
    references: Sequence[str],
    *,
    shape: str,
    context: int,
    batch: int,
) -> list[TimedRow]:
    """Return one row a candidate. references: candidates that ratios are to, if they have times."""
    median = {x.name: statistics.median(x.ms) for x in candidates if x.ms}
    rows = []
    for candidate in candidates:
        row = TimedRow(candidate.name, shape, context, batch, problem=candidate.problem)
        if candidate.name in median:
            row.ms, row.least_ms = median[candidate.name], min(candidate.ms)
            row.kv_bytes, row.read_bytes = candidate.kv_bytes(), candidate.read_bytes()
            if row.read_bytes is not None:
                row.gb_s = row.read_bytes / row.ms / 1e6
            row.ratios = {name: median[name] / row.ms for name in references if name in median}
            row.fell = sorted(candidate.fallbacks)
        rows.append(row)
    return rows
