"""Steps for channels with two more bits: choose them, split their codes, and join them again.

The arithmetic is that of `quantize.boosted`. Addresses are int64. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...cpu_runtime import kernel_step
from ...simd import load_byte, load_i32, load_one, made, splat, store, store_one
from .codes import put_one, put_vector
from .tiles import size_of


@intrinsic
def put_byte(ctx: Any, address: Any, x: Any) -> Any:
    """Store the lowest byte of an integer."""
    byte = ir.IntType(8)
    return made(
        types.void(types.int64, types.int64), lambda b, a, x: put_vector(b, a, b.trunc(x, byte))
    )


@intrinsic
def put_i32(ctx: Any, address: Any, x: Any) -> Any:
    """Store an integer as int32."""
    word = ir.IntType(32)
    return made(
        types.void(types.int64, types.int64), lambda b, a, x: put_vector(b, a, b.trunc(x, word))
    )


@kernel_step
def choose(low, high, d, boost, tops):  # type: ignore[no-untyped-def]
    """Write by what the range of each channel is divided: 3.75 for `boost` of them, else 3."""
    for c in range(0, d, 16):
        store(tops + 4 * c, splat(np.float32(3.0)))
    for _ in range(boost):
        most, best = np.float32(-1.0), 0
        for c in range(d):
            size = load_one(high + 4 * c, 0) - load_one(low + 4 * c, 0)
            if size > most and load_one(tops + 4 * c, 0) == np.float32(3.0):
                most, best = size, c
        store_one(tops + 4 * best, np.float32(3.75))


@kernel_step
def sign_scales(scale, meta, d, boost, tops, places, to):  # type: ignore[no-untyped-def]
    """Store the scales of boosted channels negative; leave each one's place, or -1.

    scale: as fp32, of which those of boosted channels become a quarter. tops: from `choose`;
    becomes the highest code. places: int32 [boost].
    """
    j, step = 0, size_of(meta)
    for c in range(d):
        one = load_one(scale + 4 * c, 0)
        if load_one(tops + 4 * c, 0) == np.float32(3.75) and one < np.float32(np.inf):
            put_one(to + step * c, -one, meta)
            store_one(scale + 4 * c, one * np.float32(0.25))
            store_one(tops + 4 * c, np.float32(15.0))
            put_i32(places + 4 * j, c)
            j += 1
        else:
            store_one(tops + 4 * c, np.float32(3.0))
    for i in range(j, boost):
        put_i32(places + 4 * i, -1)


@kernel_step
def unsign_scales(scale, d, boost, places):  # type: ignore[no-untyped-def]
    """Invert `sign_scales`: scales fp32 [d] without a sign, and where boosted channels are."""
    j = 0
    for c in range(d):
        one = load_one(scale + 4 * c, 0)
        if one < np.float32(0.0):
            store_one(scale + 4 * c, one * np.float32(-0.25))
            put_i32(places + 4 * j, c)
            j += 1
    for i in range(j, boost):
        put_i32(places + 4 * i, -1)


@kernel_step
def split_codes(codes, low, boost, places):  # type: ignore[no-untyped-def]
    """Move the low two bits of boosted channels' codes to `boost` codes of their own."""
    for j in range(boost):
        c = load_i32(places + 4 * j)
        code = load_byte(codes + c) if c >= 0 else 0
        put_byte(low + j, code & 3)
        if c >= 0:
            put_byte(codes + c, code >> 2)


@kernel_step
def join_codes(codes, low, boost, places):  # type: ignore[no-untyped-def]
    """Invert `split_codes`."""
    for j in range(boost):
        c = load_i32(places + 4 * j)
        if c >= 0:
            put_byte(codes + c, 4 * load_byte(codes + c) + load_byte(low + j))
