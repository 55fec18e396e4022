"""Progress of a long command, on stderr: a bar on a terminal, plain lines elsewhere.

    with progress() as shown:
        shown("loading the model")
        for i, layer in enumerate(layers):
            shown("calibrating", i, len(layers))
            ...
            shown.line(f"layer {i}: done")

Stdout is left to the result, so that it can be piped or written to a file.
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
"""Seconds between two plain lines; a command that is done sooner prints none."""


@contextmanager
def progress() -> Iterator[Progress]:
    """Show the progress of the work in this context; yields the `Progress` to report it to."""
    shown = Bar() if sys.stderr.isatty() else Lines()
    with shown:
        yield shown


class Progress:
    """Where work reports how far it is."""

    def __call__(self, what: str, at: int = 0, of: int | None = None) -> None:
        """Report the current work and how much of all work is done: `at` of `of` units.

        of: None if the number of units is unknown.
        """
        raise NotImplementedError

    def line(self, text: str) -> None:
        """Print a line that stays, such as a finished result."""
        raise NotImplementedError

    def counter(self, of: int) -> Callable[[str, int], None]:
        """Return a function for work that reports the units done since its last report.

        Its arguments are the current work, "" for the same as before, and that number of units.
        """
        what, at = "", 0

        def count(now: str, units: int) -> None:
            nonlocal what, at
            what, at = now or what, at + units
            self(what, at, of)

        return count


class Bar(Progress):
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

    def __call__(self, what: str, at: int = 0, of: int | None = None) -> None:
        """Move the bar."""
        self._rich.update(self._task, description=what, completed=at, total=of)

    def line(self, text: str) -> None:
        """Print above the bar."""
        self._rich.console.print(text, soft_wrap=True, markup=False, highlight=False)


class Lines(Progress):
    """A line every `EVERY_S` seconds, also while the work itself reports nothing."""

    def __enter__(self) -> None:
        self._begin = time.monotonic()
        self._now: tuple[str, int, int | None] = ("starting", 0, None)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._done.set()
        self._thread.join()

    def __call__(self, what: str, at: int = 0, of: int | None = None) -> None:
        """Remember what the next line says."""
        self._now = what, at, of

    def line(self, text: str) -> None:
        """Print at once."""
        typer.echo(text, err=True)

    def _repeat(self) -> None:
        while not self._done.wait(EVERY_S):
            what, at, of = self._now
            part = f"{at / of:4.0%} " if of else ""
            minutes, seconds = divmod(round(time.monotonic() - self._begin), 60)
            self.line(f"kvloom: {part}{what} ({minutes}:{seconds:02})")
