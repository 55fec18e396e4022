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

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

EVERY_S = 10.0
"""Seconds between two plain lines; a shorter command prints none."""


@contextmanager
def show_progress() -> Iterator[ProgressDisplay]:
    """Show the progress of the work in this context; yields the `ProgressDisplay` to report to."""
    progress = Bar() if sys.stderr.isatty() else Lines()
    with progress:
        yield progress


class ProgressDisplay:
    """Shows the progress that work reports to it."""

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Report the current work, and that `done` of `total` units of all work are finished.

        total: None if the number of units is unknown.
        """
        raise NotImplementedError

    def line(self, text: str) -> None:
        """Print a line that remains visible, such as a finished result."""
        raise NotImplementedError

    def counter(self, total: int) -> Callable[[str, int], None]:
        """Return a function that reports the units finished since its last call.

        Its arguments are the current work ("" for the same as before), and that number of units.
        """
        what, done = "", 0

        def count(current: str, units: int) -> None:
            nonlocal what, done
            what, done = current or what, done + units
            self(what, done, total)

        return count


class Bar(ProgressDisplay):
    """A bar on a terminal; it disappears at the end."""

    def __enter__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
            TimeElapsedColumn(),
        )  # fmt: skip
        self._rich = RichProgress(
            *columns, console=Console(stderr=True), transient=True, refresh_per_second=4
        )
        self._task = self._rich.add_task("starting", total=None)
        self._rich.start()

    def __exit__(self, *_: Any) -> None:
        self._rich.stop()

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Update the bar."""
        self._rich.update(self._task, description=what, completed=done, total=total)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._rich.console.print(text, soft_wrap=True, markup=False, highlight=False)


class Lines(ProgressDisplay):
    """A line every `EVERY_S` seconds, also while the work itself reports nothing."""

    def __enter__(self) -> None:
        self._begin = time.monotonic()
        self._current: tuple[str, int, int | None] = ("starting", 0, None)
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._finished.set()
        self._thread.join()

    def __call__(self, what: str, done: int = 0, total: int | None = None) -> None:
        """Store the content of the next line."""
        self._current = what, done, total

    def line(self, text: str) -> None:
        """Print at once."""
        typer.echo(text, err=True)

    def _repeat(self) -> None:
        while not self._finished.wait(EVERY_S):
            what, done, total = self._current
            part = f"{done / total:4.0%} " if total else ""
            minutes, seconds = divmod(round(time.monotonic() - self._begin), 60)
            self.line(f"kvloom: {part}{what} ({minutes}:{seconds:02})")
