"""Progress of a long command, on stderr: a bar on a terminal, plain lines elsewhere.

    with show_progress() as progress:
        progress("loading the model")
        for i, layer in enumerate(layers):
            progress("calibrating", i, len(layers))
            ...
            progress.line(f"layer {i}: done")

Stdout is only for the result, so that it can be piped or written to a file.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import typer

EVERY_S = 10.0
"""Seconds between two plain lines; a shorter command prints none."""


@contextmanager
def show_progress() -> Iterator[ProgressDisplay]:
    """Show the progress of the work in this context; yields the `ProgressDisplay` to report to."""
    display = ProgressDisplay()
    finished = threading.Event()
    thread = threading.Thread(target=display.print_lines, args=(finished,), daemon=True)
    with display.bar:
        if display.bar.disable:
            thread.start()
        try:
            yield display
        finally:
            finished.set()
            if display.bar.disable:
                thread.join()


class ProgressDisplay:
    """Shows the progress that work reports to it."""

    def __init__(self) -> None:
        from rich import progress as rich
        from rich.console import Console

        self.bar = rich.Progress(
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.TaskProgressColumn(),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=4,
            speed_estimate_period=math.inf,  # the mean speed since the first finished unit
            disable=not sys.stderr.isatty(),
        )
        self.task = self.bar.add_task("starting", total=None)

    def __call__(self, what: str, done: float = 0, total: int | None = None) -> None:
        """Report the current work, and that `done` of `total` units of all work are finished.

        total: None if the number of units is unknown.
        """
        self.bar.update(self.task, description=what, completed=done, total=total)

    def counter(self, total: int) -> Callable[[str, float], None]:
        """Return a function that reports the units finished since its last call.

        Its arguments are the current work ("" for the same as before), and that number of units.
        The first call reports the units that an earlier run finished.
        """

        def count(what: str, units: float) -> None:
            self.bar.update(self.task, description=what or None, advance=units, total=total)

        return count

    def line(self, text: str) -> None:
        """Print a line that remains visible, such as a finished result."""
        if self.bar.disable:
            typer.echo(text, err=True)
        else:
            self.bar.console.print(text, soft_wrap=True, markup=False, highlight=False)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar in this context, which prints a part of the result on stdout."""
        self.bar.stop()
        yield
        self.bar.start()

    def print_lines(self, finished: threading.Event) -> None:
        """Print a line every `EVERY_S` seconds, also while the work itself reports nothing."""
        (task,) = self.bar.tasks
        while not finished.wait(EVERY_S):
            share = f"{task.percentage / 100:4.0%} " if task.total else ""
            times = show_seconds(task.elapsed or 0)
            if task.total and task.time_remaining is not None:
                times += f", about {show_seconds(task.time_remaining)} left"
            self.line(f"kvloom: {share}{task.description} ({times})")


def show_seconds(seconds: float) -> str:
    """Return a time as hours, minutes and seconds: "0:02:10"."""
    return str(timedelta(seconds=round(seconds)))
