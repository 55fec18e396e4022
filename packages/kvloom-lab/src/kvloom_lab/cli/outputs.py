"""What commands write: tables to stdout, JSON, plots and pages to files."""

from __future__ import annotations

import os
import shutil
from json import dumps
from pathlib import Path
from typing import Any

import typer

from kvloom.errors import InputError


def check_outputs(*paths: str | Path | None, plot: Path | None = None) -> None:
    """Raise `InputError` for an output that cannot be written, before minutes of work.

    paths: files; None and "-" are always valid. plot: a picture, which needs matplotlib.
    """
    from ..report.plots import check_plot

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
