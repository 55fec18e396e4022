"""SmoothQuant (arXiv:2211.10438) for the cache, as SKVQ's harness runs it.

Each channel is divided by its calibrated largest magnitude (alpha = 1: the whole scale moves to the
cache), then rounded per token and head. Keys are quantized as they were before RoPE. There is no
window and no sink.

Departures: the prompt attends exactly, and so does a step to its own token (the harness quantizes
both before they attend); codes are computed with the stored, rounded scale and zero; a group lies
within a head (the harness groups consecutive channels of all heads, which is the same wherever the
group divides head_dim).
"""

from __future__ import annotations

from ...store import Packed, Store
from ..spec import Protect, Recipe


def smoothquant(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    pre_rope: bool = True,
    meta: str = "fp16",
    calibration: str = "auto",
) -> Recipe:
    """SmoothQuant (arXiv:2211.10438): channels divided by calibrated magnitudes, then rounded."""
    return Recipe(
        store=Store(
            keys=Packed(bits, "token", group, meta, smooth=True, pre_rope=pre_rope),
            values=Packed(bits, "token", group, meta, smooth=True),
            calibration=None if calibration == "auto" else calibration,
        ),
        protect=Protect(recent=residual),
    )
