"""The edge of the program: shared arguments, errors as one sentence, libraries that keep quiet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE", help="Text to read; default: CPython's library."),
]
Model = Annotated[
    str, typer.Option(help="Hub id or folder of a model; default: the reference model.")
]
Dtype = Annotated[
    str, typer.Option(help="auto (that of the weights), bfloat16, float16 or float32.")
]
Json = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write figures as JSON; -: to stdout.")
]


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


def named(model: str) -> str:
    """A model's name: its hub id, or that of its folder."""
    return Path(model).name if Path(model).is_dir() else model


def source(files: list[Path] | None) -> str:
    """What the text to read is called."""
    return ", ".join(f.name for f in files) if files else "CPython's library"


def show(data: str, json: str | None, table: Any) -> None:
    """Print the table, or the data where that goes to stdout; write it where it goes to a file."""
    if json == "-":
        typer.echo(data)
        return
    if json:
        Path(json).write_text(data + "\n", encoding="utf-8")
    printed(table)


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
