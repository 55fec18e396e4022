"""How commands show errors: which are the user's to mend, and each in one sentence."""

from __future__ import annotations

import re

from .. import errors

_KNOWN: tuple[type[Exception], ...] = (
    *(e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)),
)


def explained(error: Exception) -> str | None:
    """Return what an error means to the user, in a sentence; None if it is a defect of the program.

    A lack of memory is explained too: mostly, the context is too long.
    """
    if isinstance(error, _KNOWN):
        return str(error)
    size = re.search(r"[Tt]ried to allocate ([\d.]+ \w+)", str(error))
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and size):
        asked = "that much" if size is None else f"{size[1]} more"
        return f"there is no memory for {asked}; take fewer tokens, a smaller batch or model"
    return None


def sentence(error: Exception) -> str:
    """Return one line about any error."""
    lines = str(error).strip().splitlines()
    return explained(error) or f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
