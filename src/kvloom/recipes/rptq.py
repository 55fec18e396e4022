"""RPTQ (arXiv:2304.01089) for the cache, as SKVQ compares with it.

Channels that are alike in calibration form a group, whose range is that of calibration: no scale
and zero are stored, and what lies outside is clipped. Nothing is exact.
"""

from __future__ import annotations

from ..recipe import Protect, Recipe
from ..store import Packed, Store, Transform


def rptq(
    bits: int | float = 2, group: int = 32, residual: int = 0, calibration: str = "auto"
) -> Recipe:
    """RPTQ (arXiv:2304.01089): channels grouped and ranges fixed by calibration."""
    transform = Transform("layer", reorder=True, static=True)
    fmt = Packed(bits, "token", group, transform=transform)
    path = None if calibration == "auto" else calibration
    return Recipe(store=Store(fmt, fmt, path), protect=Protect(recent=residual), name="rptq")
