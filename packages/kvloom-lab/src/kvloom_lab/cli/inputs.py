"""What commands read: models, text files, stdin and text arguments; and their names in results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvloom.errors import InputError

if TYPE_CHECKING:
    from .progress import ProgressDisplay


def silence_transformers() -> None:
    """Let transformers log errors only: its progress bars and advice would mix with ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


class ChosenModel:
    """The model of `--model` and `--dtype`: its config and tokenizer at first, later its weights.

    A wrong model is refused at once. name: in results, its hub id or the name of its folder.
    """

    def __init__(self, option: str, dtype: str) -> None:
        from ..models import load_config_and_tokenizer

        silence_transformers()
        self.option, self.dtype = option, dtype
        self.name = Path(option).name if Path(option).is_dir() else option
        self.config, self.tokenizer = load_config_and_tokenizer(option, dtype)

    def load(self, progress: ProgressDisplay) -> Any:
        """Load the weights and report it as progress, because it may take minutes."""
        from .. import models

        progress(f"loading {self.name}")
        return models.load_model(self.option, self.dtype)


class ChosenText:
    """The text of files given as arguments and by `--text`; without any, CPython's library.

    name: of the text in results.
    """

    def __init__(self, files: list[Path] | None, text: list[Path] | None) -> None:
        from ..workload.text import library_text, read_files

        found = [*(files or ()), *(text or ())]
        self.name = text_name(found) if found else "CPython's library"
        self.content = read_files(found) if found else library_text()


def conditions(loaded: Any, model: ChosenModel, text: str, **more: Any) -> dict[str, Any]:
    """Return the environment of results: versions, hardware, names of model and text, and more."""
    from ..report.machine import machine

    return {**machine(loaded), "model": model.name, "text": text, **more}


def text_name(files: list[Path]) -> str:
    """Return the name of a text in results."""
    return ", ".join(map(printable_name, files))


def printable_name(path: Path) -> str:
    """Return a file's name; characters that cannot be written as UTF-8 become question marks."""
    return path.name.encode("utf-8", "replace").decode("utf-8")


def read_stdin() -> str:
    """Return the text that is piped in or typed; raises `InputError` if it is not UTF-8."""
    if sys.stdin.isatty():
        typer.echo("reading text from stdin; press Ctrl-D to end it", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InputError("stdin is not UTF-8 text; convert it first") from error


def check_utf8(what: str, text: str) -> str:
    """Return the text of an argument; raises `InputError` if its bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python decodes invalid bytes to surrogates
        raise InputError(f"{what} is not UTF-8 text; convert it first") from error
    return text
