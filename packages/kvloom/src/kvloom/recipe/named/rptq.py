"""RPTQ (arXiv:2304.01089) for the cache, as SKVQ's harness runs it.

Channels that are alike in calibration form a group, over all key/value heads; a group's range is
that of the token itself. Keys are quantized as they were before RoPE. There is no clipping, no
window and no sink.

Departures: the prompt attends exactly, and so does a step to its own token (the harness quantizes
both before they attend); codes are computed with the stored, rounded scale and zero. RPTQ's paper
fixes the ranges by calibration; SKVQ's harness does not. `Packed(..., reorder=True, static=True)`
does.
"""

from __future__ import annotations

from functools import partial

from ...store import Packed, Store
from ..spec import Protect, Recipe


def rptq(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    pre_rope: bool = True,
    meta: str = "fp16",
    calibration: str = "auto",
) -> Recipe:
    """RPTQ (arXiv:2304.01089): channels grouped by calibration, then rounded per token."""
    packed = partial(Packed, axis="token", group=group, meta=meta, span="layer", reorder=True)
    return Recipe(
        store=Store(
            keys=packed(bits, pre_rope=pre_rope),
            values=packed(bits),
            calibration=None if calibration == "auto" else calibration,
        ),
        protect=Protect(recent=residual),
    )
