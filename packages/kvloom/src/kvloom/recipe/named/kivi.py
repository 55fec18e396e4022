"""KIVI: a tuning-free asymmetric 2-bit quantization for KV cache (arXiv:2402.02750).

Keys have outlier channels and are quantized per channel, values per token (section 3). The keys'
residual fills to R tokens and is packed whole; the values' newest R tokens form a queue (section
3.2, Algorithm 1). The prompt's own attention is exact, and the step that fills the residual still
sees exact keys.

Departures: scales are guarded for constant groups (the official code divides by zero); codes are
computed with the stored, rounded scale and zero; keys and values are never repeated for
grouped-query attention; padding does not enter a group's range. Not in the paper: `rotate`, which
quantizes keys and values after the rotation of `turbo`, and `sinks`, first tokens that stay exact.
"""

from __future__ import annotations

from ...store import Packed, Store
from ..spec import Protect, Recipe


def kivi(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 128,
    meta: str = "fp16",
    rotate: bool = False,
    sinks: int = 0,
) -> Recipe:
    """KIVI (arXiv:2402.02750): keys per channel, values per token, 2 bits."""
    rotation = "head" if rotate else "none"
    return Recipe(
        store=Store(
            keys=Packed(bits, "channel", group, meta, residual=residual, rotation=rotation),
            values=Packed(bits, "token", group, meta, rotation=rotation),
        ),
        protect=Protect(sinks, (0, residual)),
    )


def kivi_4(
    group: int = 32,
    residual: int = 128,
    meta: str = "fp16",
    rotate: bool = False,
    sinks: int = 0,
) -> Recipe:
    """KIVI at 4 bits."""
    return kivi(4, group, residual, meta, rotate, sinks)
