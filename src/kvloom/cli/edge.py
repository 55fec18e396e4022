"""The edge of the program: shared arguments, errors as one sentence, libraries that keep quiet."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ..recipe.spec import Recipe
    from .progress import Progress

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


RECIPE = 'A name with its options, or a recipe file: "kivi:bits=4", mine.toml (see kvloom recipes).'
RECIPES = 'Names with their options, or recipe files: "kivi:bits=4,rtn,mine.toml"'


@contextmanager
def told() -> Iterator[None]:
    """Print a user's mistake as one sentence on stderr and leave with exit status 2.

    An error that is a defect of the program keeps its traceback.
    """
    from ..report.errors import explained

    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:
        why = explained(error)
        if why is None:
            raise
        typer.echo(f"kvloom: {why}", err=True)
        raise typer.Exit(2) from None


def quiet() -> None:
    """Let transformers report errors only: its progress bars and advice would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def writable(*paths: str | Path | None, plot: Path | None = None) -> None:
    """Refuse a file that could not be written before minutes of work; None and "-" are fine."""
    from ..errors import InputError
    from ..report.picture import check

    if plot:
        check(plot)
    for path in (Path(path) for path in (*paths, plot) if path not in (None, "-")):
        folder = path.absolute().parent
        if path.is_dir() or not folder.is_dir():
            raise InputError(f"cannot write {str(path)!r}; give a file in a folder that exists")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise InputError(f"cannot write {str(path)!r}: no permission; give another file")


def write(path: str | Path, text: str) -> None:
    """Write a file; raises `InputError` if the system does not."""
    from ..errors import InputError

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror}") from error


def stdin() -> str:
    """The text that is piped in, or typed; raises `InputError` if it is not UTF-8."""
    from ..errors import InputError

    if sys.stdin.isatty():
        typer.echo("reading text from here; Ctrl-D ends it", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8 text; convert it first") from error


def argument(what: str, text: str) -> str:
    """The text of an argument; raises `InputError` if its bytes are not UTF-8."""
    from ..errors import InputError

    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes that Python could not decode are surrogates
        raise InputError(f"{what} is not UTF-8 text; convert it first") from error
    return text


def chosen(recipes: str) -> list[Recipe]:
    """The recipes that an option names; a wrong one is told before anything is loaded."""
    from ..errors import InputError
    from ..recipe.resolve import RECIPES, resolve

    specs = split(recipes)
    if not specs:
        raise InputError(f"--recipes names no recipe; there are {', '.join(RECIPES)}")
    return [resolve(spec) for spec in specs]


def split(recipes: str) -> list[str]:
    """Part "kivi:bits=4,group=64,rtn" into recipes: an option belongs to the name before it."""
    parts: list[str] = []
    for item in (item.strip() for item in recipes.split(",")):
        key, equals, _ = item.partition("=")
        if equals and not {":", "@"} & set(key) and parts and ":" in parts[-1]:
            parts[-1] += f",{item}"
        elif item:
            parts.append(item)
    return parts


def loaded(model: str, dtype: str, shown: Progress) -> Any:
    """Load a model, which may take minutes."""
    from ..eval import load_model

    shown(f"loading {named(model)}")
    return load_model(model, dtype)


def named(model: str) -> str:
    """A model's name: its hub id, or that of its folder."""
    return Path(model).name if Path(model).is_dir() else model


def source(files: list[Path] | None) -> str:
    """What the text to read is called."""
    return ", ".join(map(spelled, files)) if files else "CPython's library"


def spelled(path: Path) -> str:
    """A file's name in letters that can be written; others are question marks."""
    return path.name.encode("utf-8", "replace").decode("utf-8")


def show(data: str, json: str | None, table: Any) -> None:
    """Print the table, or the data where that goes to stdout; write it where it goes to a file."""
    if json == "-":
        typer.echo(data)
        return
    printed(table)
    if json:
        write(json, data + "\n")


def width() -> int:
    """Columns to print in: `COLUMNS`, else the terminal's, else 100; at least 20."""
    return max(20, shutil.get_terminal_size((100, 24)).columns)


def printed(shown: Any) -> None:
    """Print what rich can print, in `width()` columns."""
    from rich.console import Console

    Console(width=width()).print(shown)
