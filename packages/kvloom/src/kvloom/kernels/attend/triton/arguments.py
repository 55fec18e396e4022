"""Arguments of Triton's decode kernels that belong together."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ....encoding import LayerEncoding
from ...quantize.hadamard import levels
from ...quantize.triton import butterflies


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

    @classmethod
    def of(cls, x: Any) -> ExactRows:
        """Return those of x [B, H, N, D]."""
        return cls(x, *x.stride()[:3])


class Form(NamedTuple):
    """The form of packed keys or values, from their encoding; a kernel is compiled for it."""

    bits: int = 0  # 0: nothing is packed; 15: 1.5
    kind: int = 0  # what shares a scale: 0 tokens, 1 channels, 2 channels by table, 3 all tokens
    group: int = 0
    rotation: int = 0  # of rotated channels: 1 codes are levels, 2 code * scale + zero
    turns: int = 0  # 2^turns channels are rotated together; 0 if none are, or another number
    norm: float = 1.0  # of this rotation
    divided: bool = False
    half: bool = False  # tokens are unpacked in fp16
    table: tuple[int, ...] = ()  # levels in fp16, up to 16: see `decode_kernel._levels`

    @classmethod
    def of(cls, layer_encoding: LayerEncoding, half: bool) -> Form:
        """Return the form of a layer's keys or values; half: fp16 holds its scales and tokens."""
        encoding = layer_encoding.encoding
        kind = 0 if encoding.axis == "channel" else 1
        if encoding.rotation != "group" and layer_encoding.group_of is not None:
            kind = 2 if layer_encoding.static is None else 3
        half = half and layer_encoding.divisor is None
        turns = butterflies(layer_encoding.rotation_size)
        by_table = half and encoding.rotation == "group" and encoding.bits in (1, 2, 3, 4)
        return cls(
            15 if encoding.bits == 1.5 else int(encoding.bits),
            kind,
            layer_encoding.group,
            {"none": 0, "group": 1, "head": 2}[encoding.rotation],
            turns["STAGES"],
            turns["NORM"],
            layer_encoding.divisor is not None,
            half,
            _table(encoding.bits) if by_table else (),
        )


@cache
def _table(bits: float) -> tuple[int, ...]:
    """Return the last eight levels, or all: their low bytes in two words, and their high bytes."""
    table = levels(bits)[-8:].half()
    table = torch.nn.functional.pad(table, (0, 8 - len(table))).view(torch.uint8)
    words = torch.cat([table[0::2], table[1::2]]).view(torch.int32)
    return tuple(word & 0xFFFFFFFF for word in words.tolist())


class Options(NamedTuple):
    """What attention takes into account; a kernel is compiled for it."""

    causal: bool = False
    padded: bool = False
    softcapped: bool = False
    biased: bool = False
    first: bool = False  # exact first tokens, beside those of the views
    chosen: bool = False  # tokens at slots
    spanned: bool = False  # heads that have spans of one row
