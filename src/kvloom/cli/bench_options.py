"""How `kvloom bench` reads its options; raises `InputError` for values that it cannot use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    import torch


def parse_heads(option: str) -> tuple[int, int]:
    """Read "32/8" (query heads, key/value heads), or "8" (as many of both)."""
    parts = option.split("/")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--heads {option!r} is not query heads/key-value heads, such as 32/8")
    return int(parts[0]), int(parts[-1])


def parse_dtype(option: str) -> torch.dtype:
    """Read "bfloat16", "float16" or "float32"."""
    from ..workload.shapes import DTYPES

    if option not in DTYPES:
        raise InputError(f"--dtype {option!r} is unknown; use one of {', '.join(DTYPES)}")
    return DTYPES[option]
