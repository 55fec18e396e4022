"""Progress of a long command, on stderr: a bar on a terminal, plain lines elsewhere.

    with show_progress() as progress:
        progress("loading the model")
        for i, layer in enumerate(layers):
            progress("calibrating", i, len(layers))
            ...
            progress.line(f"layer {i}: done")

A `counter` knows all work of a command, and also shows about how long the rest takes.

Stdout is only for the result, so that it can be piped or written to a file.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import typer

EVERY_S = 10.0
"""Seconds between two plain lines; a shorter command prints none."""
LEAST = 0.02
"""The share of the work that must be finished before its end is estimated."""


@contextmanager
def show_progress() -> Iterator[ProgressDisplay]:
    """Show the progress of the work in this context; yields the `ProgressDisplay` to report to."""
    progress = Bar() if sys.stderr.isatty() else Lines()
    with progress:
        yield progress


class Estimate:
    """Estimates how long the rest of the work takes, at the mean speed since the first report.

    clock: returns seconds.
    """

    def __init__(self, total: float, clock: Callable[[], float]) -> None:
        self._total, self._clock = total, clock
        self._first: tuple[float, float] | None = None  # seconds on the clock, finished units
        self._last = 0.0, 0.0  # the same of the last report with more units

    def report(self, done: float) -> None:
        """Report how many units are finished; those of the first report are of an earlier run."""
        if self._first is None:
            self._first = self._last = self._clock(), done
        elif done > self._last[1]:
            self._last = self._clock(), done

    def seconds_left(self) -> float | None:
        """Return the seconds until all units are finished; None while too few are."""
        if self._first is None:
            return None
        (begin, before), (end, done) = self._first, self._last
        if done - before < max(LEAST * (self._total - before), 1e-9):
            return None
        left = (self._total - done) * (end - begin) / (done - before)
        return max(0.0, left - (self._clock() - end))


class ProgressDisplay:
    """Shows the progress that work reports to it."""

    _estimate: Estimate | None = None

    def __call__(self, what: str, done: float = 0, total: int | None = None) -> None:
        """Report the current work, and that `done` of `total` units of all work are finished.

        total: None if the number of units is unknown.
        """
        raise NotImplementedError

    def line(self, text: str) -> None:
        """Print a line that remains visible, such as a finished result."""
        raise NotImplementedError

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the display in this context, which prints a part of the result on stdout."""
        yield

    def counter(self, total: int) -> Callable[[str, float], None]:
        """Return a function that reports the units finished since its last call.

        Its arguments are the current work ("" for the same as before), and that number of units.
        The first call reports the units that an earlier run finished.
        """
        from ..workload import clock

        what, done = "", 0.0
        self._estimate = estimate = Estimate(total, clock.seconds)

        def count(current: str, units: float) -> None:
            nonlocal what, done
            what, done = current or what, done + units
            estimate.report(done)
            self(what, done, total)

        return count

    @property
    def time_left(self) -> str:
        """How long the rest of the counted work takes: "about 0:02:10 left"; "" if not known."""
        seconds = None if self._estimate is None else self._estimate.seconds_left()
        return "" if seconds is None else f"about {show_seconds(seconds)} left"


def show_seconds(seconds: float) -> str:
    """Return a time as hours, minutes and seconds: "0:02:10"."""
    return str(timedelta(seconds=round(seconds)))


class Bar(ProgressDisplay):
    """A bar on a terminal; it disappears at the end."""

    def __enter__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
            TimeElapsedColumn(), TextColumn("{task.fields[shown].time_left}"),
        )  # fmt: skip
        self._rich = RichProgress(
            *columns, console=Console(stderr=True), transient=True, refresh_per_second=4
        )
        self._task = self._rich.add_task("starting", total=None, shown=self)
        self._rich.start()

    def __exit__(self, *_: Any) -> None:
        self._rich.stop()

    def __call__(self, what: str, done: float = 0, total: int | None = None) -> None:
        """Update the bar."""
        self._rich.update(self._task, description=what, completed=done, total=total)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._rich.console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Remove the bar, and show it again after the context."""
        self._rich.stop()
        yield
        self._rich.start()


class Lines(ProgressDisplay):
    """A line every `EVERY_S` seconds, also while the work itself reports nothing."""

    def __enter__(self) -> None:
        self._begin = time.monotonic()
        self._current: tuple[str, float, int | None] = ("starting", 0, None)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._finished.set()
        self._thread.join()

    def __call__(self, what: str, done: float = 0, total: int | None = None) -> None:
        """Store the content of the next line."""
        self._current = what, done, total

    def line(self, text: str) -> None:
        """Print at once."""
        typer.echo(text, err=True)

    def _repeat(self) -> None:
        while not self._finished.wait(EVERY_S):
            what, done, total = self._current
            part = f"{done / total:4.0%} " if total else ""
            elapsed = show_seconds(time.monotonic() - self._begin)
            times = ", ".join(filter(None, (elapsed, self.time_left)))
            self.line(f"kvloom: {part}{what} ({times})")
