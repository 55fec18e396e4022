"""The edge of the program: errors become one sentence, libraries keep quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer


@contextmanager
def told() -> Iterator[None]:
    """Say what a user did wrong in one sentence on stderr and leave with exit code 2."""
    from .. import errors as known
    from ..compare.errors import InputError

    try:
        yield
    except (
        InputError, known.CacheMisuse, known.CalibrationError, known.IncompatibleRecipe,
        known.NotFinite, known.RecipeError, known.UnsupportedModel,
    ) as error:  # fmt: skip
        typer.echo(f"kvloom: {error}", err=True)
        raise typer.Exit(2) from None


def quiet() -> None:
    """Let transformers report errors only: its progress bars and advice would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def writable(*paths: str | Path | None) -> None:
    """Refuse a file that could not be written before minutes of work; None and "-" are fine."""
    from ..compare.errors import InputError

    for path in (Path(path) for path in paths if path not in (None, "-")):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {str(path)!r}; give a file in a folder that exists")


def printed(shown: Any) -> None:
    """Print a rich table; 100 columns wide where nobody says how wide."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=100)).print(shown)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show a bar on stderr; yields what to call with the work at hand and the units just done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    )  # fmt: skip
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=4
    ) as bar:
        line = bar.add_task("starting", total=total)
        yield lambda what, units: bar.update(line, description=what, advance=units)
