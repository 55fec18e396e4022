"""What commands write, and how they end: results, rows of an interrupted run, the user's errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Any, TypeVar

import typer

from kvloom.errors import InputError


def check_outputs(*paths: str | Path | None, plot: Path | None = None) -> None:
    """Raise `InputError` for an output that cannot be written, before minutes of work.

    paths: files; None and "-" are always valid. plot: a picture, which needs matplotlib.
    """
    from ..show.plots import check_plot

    if plot:
        check_plot(plot)
    for path in (Path(path) for path in (*paths, plot) if path not in (None, "-")):
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir():
            raise InputError(f"cannot write {str(path)!r}; give a file in a folder that exists")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"cannot write {str(path)!r}: no permission; give another file")


def write_file(path: str | Path, text: str) -> None:
    """Write a file; raises `InputError` if the operating system refuses."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write {str(path)!r}: {error.strerror}; give another file"
        ) from error


def show_results(data: dict[str, Any], json: str | None, table: Any) -> None:
    """Print the table, or the data as JSON if `json` is "-"; write the data to the file `json`."""
    spelled = dumps(data, indent=2, ensure_ascii=False)
    if json == "-":
        typer.echo(spelled)
        return
    print_rich(table)
    if json:
        write_file(json, spelled + "\n")


def output_width() -> int:
    """Return the columns to print in: `COLUMNS`, else the terminal's, else 100; at least 20."""
    return max(20, shutil.get_terminal_size((100, 24)).columns)


def print_rich(content: Any) -> None:
    """Print what rich can print, in `output_width()` columns."""
    from rich.console import Console

    Console(width=output_width()).print(content)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print an error of the user as one sentence on stderr and exit with status 2.

    A defect of the program keeps its traceback.
    """
    from ..workload.errors import user_message

    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        typer.echo(f"kvloom: {message}", err=True)
        raise typer.Exit(2) from None


Row = TypeVar("Row")
EarlyEnd = BaseException | None
"""The Ctrl-C or the error that ended a measurement early; None if it was completed."""


def collect_rows(rows: Iterable[Row], show: Callable[[Row], None]) -> tuple[list[Row], EarlyEnd]:
    """Show each row as it is measured; return the rows, and what ended them early.

    Raises an error that comes before the first row.
    """
    rows_so_far: list[Row] = []
    try:
        for row in rows:
            rows_so_far.append(row)
            show(row)
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
