"""TurboQuant (arXiv:2504.19874): rotate, then round to fixed levels; no calibration.

Every token's key and value vector of every head is rotated (a Hadamard matrix with random signs)
and its coordinates are rounded to the Lloyd-Max levels of a normal distribution, with one scale a
vector that keeps its norm: bits + 16 / head_dim bits a packed value.

Departures: the levels are those of the paper's form for least squared error, but its scale is the
norm of the vector, so the unpacked vector is shorter than the original; here it has the same norm.
The paper's second form, which spends a bit of keys on unbiased inner products, is not implemented.
All heads and layers share one rotation; a window of recent tokens stays exact.
"""

from __future__ import annotations

from ...store import Packed, Store
from ..spec import Protect, Recipe


def turbo(
    bits: int | float = 3,
    group: int = 0,
    window: int = 128,
    sinks: int = 0,
    meta: str = "fp16",
) -> Recipe:
    """TurboQuant (arXiv:2504.19874): rotated and rounded to fixed levels, no calibration."""
    fmt = Packed(bits, "token", group, meta, rotation="group")
    return Recipe(store=Store(fmt, fmt), protect=Protect(sinks, window))
