"""Sides that take turns, so that whatever else the machine does meets all of them.

Decides what a time is: wall time of a call, without what compiling kernels took, after rounds that
are not counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..kernels import dispatch
from ..report.errors import explained, sentence

_log = logging.getLogger(__name__)

WARM_UP = 3
"""Rounds that are not counted."""
_ENOUGH_S = 20.0  # a side that has taken so long is left out of further rounds …
_LEAST = 3  # … once it has been timed so often


@dataclass
class Side:
    """Something to time.

    call: one step. prepare: what comes before each, untimed. held, read: bytes of keys and values
    that are held, and that a step reads, asked once all is measured. problem: why it has no times.
    """

    name: str
    call: Callable[[], object] | None = None
    prepare: Callable[[], object] | None = None
    held: Callable[[], int | None] = field(default=lambda: None)
    read: Callable[[], int | None] = field(default=lambda: None)
    problem: str | None = None


@dataclass
class Times:
    """Milliseconds of a side's calls, and what of kvloom ran by the reference, and why."""

    ms: list[float] = field(default_factory=list)
    fell: set[str] = field(default_factory=set)


def run(
    sides: Sequence[Side],
    repeats: int,
    tell: Callable[[str, int], None] | None = None,
    warm_up: int = WARM_UP,
) -> dict[str, Times]:
    """Time every side `repeats` times, in turns, slow ones less often; by name.

    A side whose call raises an error gets it as its `problem` and no times; the others go on.
    """
    times = {side.name: Times() for side in sides}
    slow: set[str] = set()
    with torch.inference_mode():
        for i in range(warm_up + repeats):
            for side in sides:
                if side.call is None or side.name in slow:
                    continue
                if tell:
                    tell(side.name, 0)
                try:
                    ms, fell = _time(side)
                except Exception as error:
                    side.call, side.problem, times[side.name] = None, problem(error), Times()
                    continue
                if i >= warm_up:
                    taken = times[side.name].ms
                    taken.append(ms)
                    if len(taken) >= _LEAST and sum(taken) > 1e3 * _ENOUGH_S:
                        slow.add(side.name)
                times[side.name].fell |= fell
            if tell:
                tell("", 1)
    return times


def problem(error: Exception) -> str:
    """Return why a side has no times; the traceback of a defect goes to the log."""
    if explained(error) is None:
        _log.error("a side failed", exc_info=error)
    return sentence(error)


def _time(side: Side) -> tuple[float, set[str]]:
    """Milliseconds of a call, and what of kvloom ran by the reference in it."""
    assert side.call is not None
    if side.prepare is not None:
        side.prepare()
    before = dispatch.ran.copy()
    begin = _now()
    side.call()
    ms = 1e3 * (_now() - begin)
    return ms, {
        f"{operation}: {why}"
        for (operation, backend, why), n in dispatch.ran.items()
        if backend == "ref" and n > before[operation, backend, why]
    }


def rounds(repeats: int) -> int:
    """How often `run` calls `tell` with a unit."""
    return WARM_UP + repeats


def _now() -> float:
    return time.perf_counter() - dispatch.compile_seconds()
