"""Arguments of Triton's decode kernels that belong together."""

from __future__ import annotations

from typing import Any, NamedTuple


class Side(NamedTuple):
    """What a kernel reads of keys or values: where it is, and strides of rows, heads and tokens."""

    codes: Any
    scale: Any
    zero: Any
    group_of: Any
    divisor: Any
    levels: Any
    tail: Any
    codes_b: Any
    codes_h: Any
    codes_n: Any
    meta_b: Any
    meta_h: Any
    meta_n: Any
    tail_b: Any
    tail_h: Any
    tail_n: Any


class ExactRows(NamedTuple):
    """Exact tokens: where they are, and strides of batch rows, heads and tokens."""

    first: Any
    b: Any
    h: Any
    n: Any


class Form(NamedTuple):
    """The form of packed keys or values; a kernel is compiled for it."""

    bits: int  # 0: nothing is packed; 15: 1.5
    kind: int  # which tokens and channels share a scale
    group: int
    rotation: int  # how codes of rotated channels become numbers, or 0
    divided: bool


class Options(NamedTuple):
    """What attention takes into account; a kernel is compiled for it."""

    causal: bool = False
    padded: bool = False
    softcapped: bool = False
    biased: bool = False
    chosen: bool = False
