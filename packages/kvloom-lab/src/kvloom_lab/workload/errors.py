"""How commands show errors: which ones the user can correct, each as one sentence."""

from __future__ import annotations

import logging
import re

from kvloom.errors import InputError, KvloomError

_log = logging.getLogger(__name__)


def user_message(error: Exception) -> str | None:
    """Return an error as one sentence for the user; None if it is a defect of the program.

    Covers the errors of `kvloom.errors`, and a lack of memory: usually the context is too long.
    """
    if isinstance(error, KvloomError):
        return str(error)
    size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and size):
        amount = "the tensors of this run" if size is None else f"{size[1]} more"
        return (
            f"there is not enough memory for {amount}; use fewer tokens, a smaller batch or model"
        )
    return None


def logged_line(error: Exception, what: str) -> str:
    """Return any error as one line; log the traceback of a defect, which `what` had."""
    message = user_message(error)
    if message is not None:
        return message
    _log.error("%s failed", what, exc_info=error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def check_least(least: int, **values: int | None) -> None:
    """Raise `InputError` for a value, by its name, that is below the least one; None is valid."""
    for name, value in values.items():
        if value is not None and value < least:
            raise InputError(f"{name}={value} must be {least} or more")
