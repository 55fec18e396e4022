"""Return the memory that a prompt has freed to the operating system.

glibc keeps freed blocks of up to 32 MiB for later. After a prompt these are activations, and the
exact keys and values of every layer that has been packed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

_LONG = 256  # tokens of a call from which it pays: it takes 4 to 20 ms


def return_freed(tokens: int) -> None:
    """Return freed blocks to the system after a call with `tokens` new tokens; a step keeps them.

    Does nothing where the C library is not glibc.
    """
    trim = _trim()
    if tokens >= _LONG and trim is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None without it."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
