"""Rows of a long measurement: those that are finished are kept, however it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import typer

from .progress import Progress

Row = TypeVar("Row")
Ended = BaseException | None
"""What ended a measurement early: Ctrl-C or an error; None if it was completed."""


def collect(
    rows: Iterable[Row], line: Callable[[Row], str], shown: Progress
) -> tuple[list[Row], Ended]:
    """Print a line for each row as it comes; return the rows, and what ended them early.

    An error before the first row is raised.
    """
    found: list[Row] = []
    try:
        for row in rows:
            found.append(row)
            shown.line(line(row))
    except KeyboardInterrupt as error:
        return found, error
    except Exception as error:
        if not found:
            raise
        return found, error
    return found, None


def leave(ended: Ended, missing: Sequence[str], failed: Sequence[str]) -> None:
    """End the command, after its rows are shown, with the exit status they deserve.

    missing: what an early end left out; failed: recipes whose rows have no figures. Status 130
    after Ctrl-C, 1 if a recipe failed; an error is raised again.
    """
    if isinstance(ended, KeyboardInterrupt):
        typer.echo(f"kvloom: interrupted; not measured: {', '.join(missing)}", err=True)
        raise typer.Exit(130)
    if ended is not None:
        raise ended
    if failed:
        typer.echo(f"kvloom: no figures of {', '.join(failed)}; see above", err=True)
        raise typer.Exit(1)
