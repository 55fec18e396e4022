"""Long measurements: finished rows are shown even if the measurement ends early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import typer

from .progress import ProgressDisplay

Row = TypeVar("Row")
EarlyEnd = BaseException | None
"""The Ctrl-C or the error that ended a measurement early; None if it was completed."""


def collect_rows(
    rows: Iterable[Row], line: Callable[[Row], str], progress: ProgressDisplay
) -> tuple[list[Row], EarlyEnd]:
    """Print a line for each row as it is measured; return the rows, and what ended them early.

    Raises an error that comes before the first row.
    """
    rows_so_far: list[Row] = []
    try:
        for row in rows:
            rows_so_far.append(row)
            progress.line(line(row))
    except KeyboardInterrupt as error:
        return rows_so_far, error
    except Exception as error:
        if not rows_so_far:
            raise
        return rows_so_far, error
    return rows_so_far, None


def finish(early_end: EarlyEnd, missing: Sequence[str], failed: Sequence[str]) -> None:
    """End a command after its rows are shown.

    missing: what was not measured because of the early end. failed: recipes without figures. Exits
    with status 130 after Ctrl-C, and with 1 if a recipe failed; raises the error of an early end.
    """
    if isinstance(early_end, KeyboardInterrupt):
        typer.echo(f"kvloom: interrupted; not measured: {', '.join(missing)}", err=True)
        raise typer.Exit(130)
    if early_end is not None:
        raise early_end
    if failed:
        typer.echo(f"kvloom: no figures for {', '.join(failed)}; see above", err=True)
        raise typer.Exit(1)
