"""Round-to-nearest: the plain baseline of the quantization papers."""

from __future__ import annotations

from ...store import Packed, Store
from ..spec import Protect, Recipe


def rtn(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    meta: str = "fp16",
    rotate: bool = False,
) -> Recipe:
    """Round-to-nearest per token, keys and values alike, nothing exact: the baseline."""
    fmt = Packed(bits, "token", group, meta, rotation="head" if rotate else "none")
    return Recipe(store=Store(fmt, fmt), protect=Protect(recent=residual))
