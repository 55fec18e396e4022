"""SmoothQuant (arXiv:2211.10438) for the cache, as SKVQ compares with it.

Each channel is divided by its calibrated largest magnitude (alpha = 1: all of it is moved to the
cache), then rounded per token and head. Nothing is exact.
"""

from __future__ import annotations

from ..recipe import Protect, Recipe
from ..store import Packed, Store, Transform


def smoothquant(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    meta: str = "fp16",
    calibration: str = "auto",
) -> Recipe:
    """SmoothQuant (arXiv:2211.10438): channels divided by calibrated magnitudes, then rounded."""
    fmt = Packed(bits, "token", group, meta, transform=Transform(smooth=True))
    path = None if calibration == "auto" else calibration
    return Recipe(store=Store(fmt, fmt, path), protect=Protect(recent=residual), name="smoothquant")
