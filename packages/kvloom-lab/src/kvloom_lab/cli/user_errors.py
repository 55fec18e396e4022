"""How a command ends at an error of the user: one sentence on stderr and exit status 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def user_errors() -> Iterator[None]:
    """Print an error of the user as one sentence on stderr and exit with status 2.

    A defect of the program keeps its traceback.
    """
    from ..report.errors import user_message

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
