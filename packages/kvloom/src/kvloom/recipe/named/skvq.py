"""SKVQ: sliding-window key and value cache quantization (arXiv:2405.06219).

Keys (before RoPE) and values are quantized per token, on the channels of all key/value heads
together. Channels that are alike in calibration form a group (section 3.1); each group's ends are
clipped by a calibrated factor (section 3.2); the first `sinks` tokens and the newest `window` stay
exact (section 3.3); scale and zero are fp8 (e4m3). K2V2 at group 128 is 2.125 bits a packed value;
"1.5 bits" is three levels, five of them in a byte: 1.6 bits.

Departures: a table gives the group of each channel and channels keep their order, so no permutation
is folded into weights; codes are computed with the stored, rounded scale and zero; factors are
searched (the official code has one constant, 0.92: clip=0.92); a token that leaves the window is
packed after the step, which still reads it exact. Every step of the paper's ablation is an option:
reorder=false, clip=1.0, window=0, sinks=0, meta=fp16, pre_rope=false. A filter rule beside sinks
and window: heavy=64 keeps that many tokens of the prompt exact, for each head, those with the
highest score filter=NAME (heavy hitters). span=head groups the channels of each head by themselves,
for tensor parallelism.
"""

from __future__ import annotations

from functools import partial

from ...store import Packed, Store
from ..spec import Protect, Recipe
from .general import outliers


def skvq(
    bits: int | float = 2,
    value_bits: int | float = 2,
    group: int = 128,
    window: int = 128,
    sinks: int = 5,
    clip: float | str = "group",
    reorder: bool = True,
    pre_rope: bool = True,
    meta: str = "fp8",
    heavy: int = 0,
    span: str = "layer",
    filter: str = "mass",
    calibration: str = "auto",
) -> Recipe:
    """SKVQ (arXiv:2405.06219): calibrated groups and clipping, sinks and a window, 2 bits."""
    packed = partial(
        Packed, axis="token", group=group, meta=meta, span=span, reorder=reorder, clip=clip
    )
    return Recipe(
        store=Store(
            keys=packed(bits, pre_rope=pre_rope),
            values=packed(value_bits),
            calibration=None if calibration == "auto" else calibration,
        ),
        protect=Protect(sinks, window, outliers(heavy, filter)),
    )


def skvq_k2v1_5(group: int = 128, calibration: str = "auto") -> Recipe:
    """SKVQ with keys at 2 bits and values at 1.5, which is 1.6 as packed."""
    return skvq(2, 1.5, group, calibration=calibration)
