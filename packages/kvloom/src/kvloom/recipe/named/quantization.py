"""Recipes that keep every token and store it in fewer bits.

In all of them a prompt attends exactly, and so does a step to its own token. Codes are computed
with the stored, rounded scale and zero. docs/recipes states how each recipe departs from its paper.
Options that they share:

bits: of a code. group: the numbers that share a scale. meta: the dtype of scale and zero.
residual, window: how many of the newest tokens are exact. sinks: first tokens that stay exact.
rotate: quantize after the rotation of `turbo`. pre_rope: keys are packed as before RoPE.
calibration: the file of a calibration; "auto" is the file beside the model's weights.
"""

from __future__ import annotations

from functools import partial

from ...store import Packed, Store
from ..parts import Protect
from ..spec import Recipe
from .general import outlier_rule


def rtn(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    meta: str = "fp16",
    rotate: bool = False,
) -> Recipe:
    """Round-to-nearest per token, keys and values alike, nothing exact: the baseline."""
    fmt = Packed(bits, "token", group, meta, rotation="head" if rotate else "none")
    return Recipe(store=Store(fmt, fmt), protect=Protect(exact_recent=residual))


def kivi(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 128,
    meta: str = "fp16",
    rotate: bool = False,
    sinks: int = 0,
) -> Recipe:
    """KIVI (arXiv:2402.02750): keys per channel, values per token, 2 bits.

    Keys have outlier channels, so they are quantized per channel (section 3). They gather until
    `residual` tokens are exact, and these are packed together. The newest `residual` values form a
    queue (section 3.2, Algorithm 1). The step that fills the residual still sees exact keys.
    """
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


def turbo(
    bits: int | float = 3,
    group: int = 0,
    window: int = 128,
    sinks: int = 0,
    meta: str = "fp16",
) -> Recipe:
    """TurboQuant (arXiv:2504.19874): rotated and rounded to fixed levels, no calibration.

    Each key and value of a head is rotated by a Hadamard matrix with random signs. Its coordinates
    are rounded to the Lloyd-Max levels of a normal distribution. One scale a vector keeps its norm:
    bits + 16 / head_dim bits a packed value.
    """
    fmt = Packed(bits, "token", group, meta, rotation="group")
    return Recipe(store=Store(fmt, fmt), protect=Protect(sinks, window))


def smoothquant(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    pre_rope: bool = True,
    meta: str = "fp16",
    calibration: str = "auto",
) -> Recipe:
    """SmoothQuant (arXiv:2211.10438): channels divided by calibrated magnitudes, then rounded.

    As SKVQ's harness runs it: the divisor of a channel is its largest magnitude (alpha = 1: the
    whole scale moves to the cache). There is no window and no sink.
    """
    packed = partial(Packed, bits, "token", group, meta, smooth=True)
    store = _calibrated(packed(pre_rope=pre_rope), packed(), calibration)
    return Recipe(store=store, protect=Protect(exact_recent=residual))


def rptq(
    bits: int | float = 2,
    group: int = 32,
    residual: int = 0,
    pre_rope: bool = True,
    meta: str = "fp16",
    calibration: str = "auto",
) -> Recipe:
    """RPTQ (arXiv:2304.01089): channels grouped by calibration, then rounded per token.

    As SKVQ's harness runs it, this is SKVQ without clipping, sinks and a window.
    """
    return skvq(
        bits, bits, group, residual, 0, 1.0, pre_rope=pre_rope, meta=meta, calibration=calibration
    )


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
    outliers: int = 0,
    span: str = "layer",
    outlier_score: str = "mass",
    calibration: str = "auto",
) -> Recipe:
    """SKVQ (arXiv:2405.06219): calibrated groups and clipping, sinks and a window, 2 bits.

    Keys and values are quantized per token, on the channels of all heads together. Channels that
    are alike in calibration form a group (section 3.1). A calibrated factor clips the ends of each
    group (section 3.2). The first `sinks` tokens and the newest `window` stay exact (section 3.3).
    At group 128, a packed value takes 2.125 bits; "1.5 bits" is three levels, five of them in a
    byte: 1.6 bits.

    outliers: how many tokens of the prompt stay exact in each head, those with the highest
    outlier_score. span: "head" groups the channels of each head by themselves, for tensor
    parallelism. Every step of the paper's ablation is an option: reorder=false, clip=1.0, window=0,
    sinks=0, meta=fp16, pre_rope=false.
    """
    packed = partial(
        Packed, axis="token", group=group, meta=meta, span=span, reorder=reorder, clip=clip
    )
    store = _calibrated(packed(bits, pre_rope=pre_rope), packed(value_bits), calibration)
    return Recipe(
        store=store, protect=Protect(sinks, window, outlier_rule(outliers, outlier_score))
    )


def skvq_k2v1_5(group: int = 128, calibration: str = "auto") -> Recipe:
    """SKVQ with keys at 2 bits and values at 1.5, which is 1.6 as packed."""
    return skvq(2, 1.5, group, calibration=calibration)


def _calibrated(keys: Packed, values: Packed, calibration: str) -> Store:
    return Store(keys, values, None if calibration == "auto" else calibration)
