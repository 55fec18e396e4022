"""The steps of packing and unpacking a tile of tokens.

Decides which tokens a task takes, and how one row, group or pack block is treated. Formats are
distinguished at run time, a few times per row, so one kernel covers all. The order of steps is in
`pack_kernel`. Rows of numbers are fp32, padded to whole vectors; codes are one byte each. Addresses
are int64. Importing this imports Numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...cpu_runtime import head_address, kernel_step
from ...simd import (
    load,
    load_any,
    load_byte,
    load_i32,
    load_one,
    max_lanes,
    maximum,
    minimum,
    splat,
    store,
    store_one,
)
from .arguments import CHANNEL, MAPPED, STATIC, TOKEN
from .codes import clamp_scale, decode, encode, gather, join, nonzero, put, put_one, split


@kernel_step
def size_of(dtype_code):  # type: ignore[no-untyped-def]
    """Return the bytes of a number of a dtype."""
    return 4 if dtype_code == 0 else 1 if dtype_code == 3 else 2


@kernel_step
def _get(x, i, dtype_code):  # type: ignore[no-untyped-def]
    """Load sixteen numbers of a dtype, the i-th and on."""
    if dtype_code == 0:
        return load(x + 4 * i)
    if dtype_code == 1:
        return load_any(x + 2 * i, 1)
    if dtype_code == 2:
        return load_any(x + 2 * i, 2)
    return load_any(x + i, 3)


@kernel_step
def _get_one(x, dtype_code):  # type: ignore[no-untyped-def]
    if dtype_code == 0:
        return load_one(x, 0)
    if dtype_code == 1:
        return load_one(x, 1)
    if dtype_code == 2:
        return load_one(x, 2)
    return load_one(x, 3)


@kernel_step
def widen(x, step, dtype_code, d, out):  # type: ignore[no-untyped-def]
    """Convert d numbers of a dtype, `step` bytes apart, to fp32."""
    even = d // 16 * 16 if step == size_of(dtype_code) else 0
    for c in range(0, even, 16):
        store(out + 4 * c, _get(x, c, dtype_code))
    for c in range(even, d):
        store_one(out + 4 * c, _get_one(x + step * c, dtype_code))


@kernel_step
def fill(x, d):  # type: ignore[no-untyped-def]
    """Fill a row of d numbers up to whole vectors with its first, which changes no range."""
    for c in range(d, -(-d // 16) * 16):
        store_one(x + 4 * c, load_one(x, 0))


@kernel_step
def rope_row(x, cos, sin, half, interleaved):  # type: ignore[no-untyped-def]
    """Rotate `half` pairs of a row in place; products and sums are rounded apart."""
    even = 0 if interleaved else half // 16 * 16
    for i in range(0, even, 16):
        a, b = load(x + 4 * i), load(x + 4 * (half + i))
        c, s = load(cos + 4 * i), load(sin + 4 * i)
        store(x + 4 * i, a * c - b * s)
        store(x + 4 * (half + i), b * c + a * s)
    for i in range(even, half):
        first = x + 4 * (2 * i if interleaved else i)
        second = first + 4 * (1 if interleaved else half)
        p, q = load_one(first, 0), load_one(second, 0)
        u, v = load_one(cos + 4 * i, 0), load_one(sin + 4 * i, 0)
        store_one(first, p * u - q * v)
        store_one(second, q * u + p * v)


@kernel_step
def narrow(x, d, dtype_code, out):  # type: ignore[no-untyped-def]
    """Convert d fp32 numbers to a dtype."""
    even, size = d // 16 * 16, size_of(dtype_code)
    for c in range(0, even, 16):
        put(out + size * c, load(x + 4 * c), dtype_code)
    for c in range(even, d):
        put_one(out + size * c, load_one(x + 4 * c, 0), dtype_code)


@kernel_step
def range_of_tokens(x, row, tokens, dp, nonpadding, low, high):  # type: ignore[no-untyped-def]
    """Write the least and the largest of each channel, without padding; 0 where all is padding.

    nonpadding: the address of a byte a token, 0 for padding; or 0.
    """
    any_token = nonpadding == 0
    for t in range(tokens if nonpadding != 0 else 0):
        any_token = any_token or load_byte(nonpadding + t) != 0
    for c in range(0, dp, 16):
        lo, hi = splat(np.float32(np.inf)), splat(np.float32(-np.inf))
        for t in range(tokens):
            if nonpadding == 0 or load_byte(nonpadding + t) != 0:
                values = load(x + t * row + 4 * c)
                lo, hi = minimum(values, lo), maximum(values, hi)
        if not any_token:
            lo, hi = splat(np.float32(0.0)), splat(np.float32(0.0))
        store(low + 4 * c, lo)
        store(high + 4 * c, hi)


@kernel_step
def range_of_channels(x, d, group, low, high):  # type: ignore[no-untyped-def]
    """Write the least and the largest of each group of consecutive channels."""
    for g in range(d // group):
        lo = hi = load(x + 4 * g * group)
        for c in range(g * group + 16, (g + 1) * group, 16):
            values = load(x + 4 * c)
            lo, hi = minimum(values, lo), maximum(values, hi)
        store_one(low + 4 * g, -max_lanes(lo * splat(np.float32(-1.0))))
        store_one(high + 4 * g, max_lanes(hi))


@kernel_step
def range_of_slots(x, slots, ends, groups, clip, low, high):  # type: ignore[no-untyped-def]
    """Write the least and the largest of each group, times its alpha.

    slots: int32, where the channels of the first group are, then those of the next, each in whole
    sixteens. ends: int32, where a group ends among them.
    """
    begin = 0
    for g in range(groups):
        end = load_i32(ends + 4 * g)
        lo = hi = gather(x, slots + 4 * begin)
        for i in range(begin + 16, end, 16):
            values = gather(x, slots + 4 * i)
            lo, hi = minimum(values, lo), maximum(values, hi)
        least = -max_lanes(lo * splat(np.float32(-1.0)))
        store_one(low + 4 * g, least * load_one(clip + 4 * g, 0))
        store_one(high + 4 * g, max_lanes(hi) * load_one(clip + 4 * g, 0))
        begin = end


@kernel_step
def metadata(low, high, n, top, meta, scale, zero):  # type: ignore[no-untyped-def]
    """Store scale and zero of n groups, and leave them in fp32: zeros in low, scales in high.

    top: the highest code. A scale of 0 is left as infinity: whatever is divided by it has code 0.
    """
    for i in range(0, n, 16):
        lo = load(low + 4 * i) + splat(np.float32(0.0))  # -0 to 0
        step = (load(high + 4 * i) - lo) / splat(np.float32(top))
        step = step + splat(np.float32(0.0))
        if meta == 3:
            step = clamp_scale(step)
            lo = maximum(minimum(lo, splat(np.float32(448.0))), splat(np.float32(-448.0)))
        store(low + 4 * i, lo)
        store(high + 4 * i, step)
    narrow(low, n, meta, zero)
    narrow(high, n, meta, scale)
    widen(zero, size_of(meta), meta, n, low)
    widen(scale, size_of(meta), meta, n, high)
    for i in range(0, n, 16):
        store(high + 4 * i, nonzero(load(high + 4 * i)))


@kernel_step
def join_block(codes, code_stride, d, bits_x2, out, stride):  # type: ignore[no-untyped-def]
    """Pack the codes of a pack block, one byte each, into its byte rows."""
    even = d // 16 * 16
    for c in range(0, even, 16):
        join(codes + c, code_stride, out + c, stride, bits_x2, 16)
    for c in range(even, d):
        join(codes + c, code_stride, out + c, stride, bits_x2, 1)


@kernel_step
def split_block(rows, stride, d, bits_x2, out, code_stride):  # type: ignore[no-untyped-def]
    """Invert `join_block`."""
    even = d // 16 * 16
    for c in range(0, even, 16):
        split(rows + c, stride, out + c, code_stride, bits_x2, 16)
    for c in range(even, d):
        split(rows + c, stride, out + c, code_stride, bits_x2, 1)


@kernel_step
def encode_row(x, dp, sharing, group, group_of, zero, scale, top, codes):  # type: ignore[no-untyped-def]
    """Encode a row of numbers, given zeros and scales of its groups or of its channels."""
    top_code = splat(np.float32(top))
    if sharing == TOKEN:
        for c in range(0, dp, 16):
            g = 4 * (c // group)
            z, s = splat(load_one(zero + g, 0)), splat(load_one(scale + g, 0))
            encode(load(x + 4 * c), z, s, top_code, codes + c)
    elif sharing == MAPPED:
        for c in range(0, dp, 16):
            z, s = gather(zero, group_of + 4 * c), gather(scale, group_of + 4 * c)
            encode(load(x + 4 * c), z, s, top_code, codes + c)
    else:
        for c in range(0, dp, 16):
            z, s = load(zero + 4 * c), load(scale + 4 * c)
            encode(load(x + 4 * c), z, s, top_code, codes + c)


@kernel_step
def decode_row(codes, dp, sharing, group, group_of, zero, scale, divisor, out):  # type: ignore[no-untyped-def]
    """Invert `encode_row`: a row of codes to fp32."""
    for c in range(0, dp, 16):
        if sharing == TOKEN:
            g = 4 * (c // group)
            z, s = splat(load_one(zero + g, 0)), splat(load_one(scale + g, 0))
        elif sharing == MAPPED:
            z, s = gather(zero, group_of + 4 * c), gather(scale, group_of + 4 * c)
        else:
            z, s = load(zero + 4 * c), load(scale + 4 * c)
        values = decode(codes + c, z, s)
        if divisor != 0:
            values = values * load(divisor + 4 * c)
        store(out + 4 * c, values)


class Sizes(NamedTuple):
    """Sizes that the arguments of a call give."""

    padded: int  # channels of a head, filled up to whole vectors
    row: int  # numbers of a row: of all heads whose channels form one
    meta_row: int  # bytes of a row of scales
    first: int  # tile
    tiles: int
    tasks: int


class Tile(NamedTuple):
    """The tokens of a task, counted from the first that is packed, and their storage."""

    b: int
    h: int
    lo: int
    hi: int
    codes: int  # of the pack block of token lo
    begun: int  # tokens before lo in that block
    scale: int  # of token 0, as zero
    zero: int


@kernel_step
def sizes_of(a):  # type: ignore[no-untyped-def]
    """Return the `Sizes` of a call."""
    spec, d, padded = a.spec, a.head_dim, -(-a.head_dim // 16) * 16
    row, size = a.joint_heads * padded, size_of(spec.meta)
    meta_row = (d if spec.sharing == CHANNEL else spec.groups) * size
    first = a.begin // spec.tile
    tiles = -(-(a.begin + a.tokens) // spec.tile) - first
    tasks = a.batch * (a.heads // a.joint_heads) * tiles
    return Sizes(padded, row, meta_row, first, tiles, tasks)


@kernel_step
def tile_of(a, sizes, task):  # type: ignore[no-untyped-def]
    """Return the `Tile` of a task."""
    spec, rows = a.spec, a.heads // a.joint_heads
    part, head = task % sizes.tiles + sizes.first, task // sizes.tiles
    b, h = head // rows, head % rows * a.joint_heads
    lo, hi = max(a.begin, part * spec.tile), min(a.begin + a.tokens, (part + 1) * spec.tile)
    block = lo // spec.per_block * spec.block_rows
    codes = head_address(a.codes, b, h) + block * a.codes.row
    scale, zero = head_address(a.scale, b, h), head_address(a.zero, b, h)
    return Tile(b, h, lo, hi, codes, lo % spec.per_block, scale, zero)


@kernel_step
def meta_at(spec, padded, t):  # type: ignore[no-untyped-def]
    """Return bytes from the first scale of a tile in fp32 to those of its token t."""
    if spec.sharing == CHANNEL:
        return 4 * (t // spec.group * padded)
    return 0 if spec.sharing == STATIC else 4 * t * spec.groups


@kernel_step
def rotate_to_position(rope, x, b, h, t):  # type: ignore[no-untyped-def]
    """Rotate one token of a head, fp32, by the angles of the call's token t, if there are any."""
    if rope.cos != 0:
        angle = b * rope.batch + h * rope.head + 4 * t * rope.half
        rope_row(x, rope.cos + angle, rope.sin + angle, rope.half, rope.interleaved != 0)
