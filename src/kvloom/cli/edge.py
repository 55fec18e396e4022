"""The edge of the program: errors become one sentence, libraries keep quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
