"""The kernel that quantizes and packs tokens in one pass, and the one that unpacks them.

Each is one for all formats. Decides the order of steps; `tiles` has those of a row. Formula and
byte layout: `reference`; tolerance: none, codes, scales, zeros and unpacked numbers are the
reference's to the last bit.

A task is (batch row, head, tile of tokens). Where groups span heads, a row of numbers is a token of
all heads. A tile begins and ends where bytes and groups do, so no two tasks write to one byte. A
task widens its numbers to fp32 (fp32 is read in place), computes scales and zeros and stores them,
computes codes, one byte each, from the stored scales, and joins codes into bytes. All but the
result stays in the core's caches.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from ...cpu_runtime import Kernel, count, head_address, kernel_step, read_arguments
from ...simd import load, splat, store
from .arguments import CHANNEL, PACK, ROTATED, STATIC, TOKEN
from .codes import put_codes
from .rotation_steps import (
    keep_scales,
    restore_row,
    rotate_group,
    rotate_row,
    round_row,
    unit_scales,
    unrotate_group,
)
from .tiles import (
    decode_row,
    encode_row,
    fill,
    join_block,
    meta_at,
    metadata,
    narrow,
    range_of_channels,
    range_of_slots,
    range_of_tokens,
    rotate_to_position,
    size_of,
    sizes_of,
    split_block,
    tile_of,
    widen,
)


class Scratch(NamedTuple):
    """Addresses of a thread's own memory, fp32."""

    wide: int  # the tile's numbers; to unpack, those of a row
    low: int  # the least of each group, then its zero
    high: int  # the largest, then the scale
    spare: int  # a row
    codes: int  # of the tile, a byte each


@cache
def packing() -> Kernel:
    """Compile the kernel that packs; see `pack` for its call."""
    layout = PACK.dtype

    def pack(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        spec, sizes = a.spec, sizes_of(a)
        rows = min(spec.tile, a.tokens)
        ranges = rows // spec.group if spec.sharing == CHANNEL else rows
        metas = 32 if spec.sharing == STATIC else (ranges * spec.groups + 31) // 16 * 16
        room = (rows + 1) * sizes.row + 2 * metas + (rows + 16) * sizes.row // 4 + 16
        memory = np.empty(room, np.float32)
        wide = (memory.ctypes.data + 63) // 64 * 64
        low = wide + 4 * rows * sizes.row
        spare = low + 8 * metas
        mem = Scratch(wide, low, low + 4 * metas, spare, spare + 4 * sizes.row)
        in_place = a.dtype_code == 0 and a.x.channel == 4 and a.head_dim == sizes.row
        in_place = in_place and a.tables.divisor + a.rope.cos + a.rotation.size == 0
        while True:
            task = count(args)
            if task >= sizes.tasks:
                break
            tile = tile_of(a, sizes, task)
            x, x_row = head_address(a.x, tile.b, tile.h) + (tile.lo - a.begin) * a.x.row, a.x.row
            if not in_place:
                widen_tile(a, sizes, tile, x, mem)
                x, x_row = mem.wide, 4 * sizes.row
            nonpadding = a.nonpadding.address
            if nonpadding != 0:
                nonpadding = head_address(a.nonpadding, tile.b, tile.h) + tile.lo - a.begin
            if spec.sharing == CHANNEL:
                measure_channels(a, sizes, tile, x, x_row, nonpadding, mem)
            elif spec.sharing == ROTATED:  # norms first: scales follow from the codes
                rotate_tile(a, sizes, tile, x, x_row, mem)
            elif spec.sharing != STATIC:
                measure_tokens(a, sizes, tile, x, x_row, mem)
            encode_tile(a, sizes, tile, x, x_row, mem)
            if spec.sharing == ROTATED:
                out = tile.scale + tile.lo * sizes.meta_row
                keep_scales(mem.high, mem.low, (tile.hi - tile.lo) * spec.groups, spec.meta, out)
            join_tile(a, sizes, tile, mem)
        memory[0] = 0.0  # keeps the array alive: Numba frees it after its last use

    return Kernel(pack, "pack")


@kernel_step
def widen_tile(a, sizes, tile, x, mem):  # type: ignore[no-untyped-def]
    """Write the numbers at x as the format quantizes them: fp32, rotated and divided."""
    d, rotate, divisor = a.head_dim, a.rotation, a.tables.divisor
    for t in range(tile.hi - tile.lo):
        for i in range(a.joint_heads):
            out = mem.wide + 4 * (t * sizes.row + i * sizes.padded)
            widen(x + t * a.x.row + i * a.x.head, a.x.channel, a.dtype_code, d, out)
            rotate_to_position(a.rope, out, tile.b, tile.h + i, tile.lo - a.begin + t)
            if rotate.size != 0 and a.spec.sharing != ROTATED:
                rotate_group(out, d, rotate.size, rotate.signs, rotate.mix, mem.spare)
            fill(out, d)
            if divisor != 0:
                for c in range(0, sizes.padded, 16):
                    divisors = load(divisor + 4 * ((tile.h + i) * sizes.padded + c))
                    store(out + 4 * c, load(out + 4 * c) / divisors)


@kernel_step
def measure_channels(a, sizes, tile, x, x_row, nonpadding, mem):  # type: ignore[no-untyped-def]
    """Compute and store scales and zeros of groups of tokens of a channel."""
    spec, d = a.spec, a.head_dim
    for t in range(0, tile.hi - tile.lo, spec.group):
        skip = meta_at(spec, sizes.padded, t)
        low, high = mem.low + skip, mem.high + skip
        group_nonpadding = 0 if nonpadding == 0 else nonpadding + t
        range_of_tokens(x + t * x_row, x_row, spec.group, sizes.padded, group_nonpadding, low, high)
        row = (tile.lo + t) // spec.group * sizes.meta_row
        metadata(low, high, d, spec.top, spec.meta, tile.scale + row, tile.zero + row)


@kernel_step
def measure_tokens(a, sizes, tile, x, x_row, mem):  # type: ignore[no-untyped-def]
    """Compute and store scales and zeros of groups of channels of a token."""
    spec, tables, scales = a.spec, a.tables, (tile.hi - tile.lo) * a.spec.groups
    for t in range(tile.hi - tile.lo):
        skip = meta_at(spec, sizes.padded, t)
        low, high = mem.low + skip, mem.high + skip
        if spec.sharing == TOKEN:
            range_of_channels(x + t * x_row, a.head_dim, spec.group, low, high)
        else:
            range_of_slots(
                x + t * x_row, tables.slots, tables.slot_ends, spec.groups, tables.clip, low, high
            )
    row = tile.lo * sizes.meta_row
    metadata(mem.low, mem.high, scales, spec.top, spec.meta, tile.scale + row, tile.zero + row)


@kernel_step
def rotate_tile(a, sizes, tile, x, x_row, mem):  # type: ignore[no-untyped-def]
    """Rotate groups of channels, in place, and compute their norms and the factors to units."""
    d, group, rotate, tokens = a.head_dim, a.spec.group, a.rotation, tile.hi - tile.lo
    for t in range(tokens):
        squares = mem.high + meta_at(a.spec, sizes.padded, t)
        row = x + t * x_row
        rotate_row(row, d, group, rotate.size, rotate.signs, rotate.mix, mem.spare, squares)
    unit_scales(mem.high, tokens * a.spec.groups, group, mem.low)


@kernel_step
def encode_tile(a, sizes, tile, x, x_row, mem):  # type: ignore[no-untyped-def]
    """Write the codes of the tile, behind those that its first pack block holds already."""
    spec, d, rotate = a.spec, a.head_dim, a.rotation
    for i in range(a.joint_heads if tile.begun else 0):
        source, out = tile.codes + i * a.codes.head, mem.codes + i * sizes.padded
        split_block(source, a.codes.row, d, spec.bits_x2, out, sizes.row)
    zeros, scales = mem.low, mem.high
    if spec.sharing == STATIC:
        zeros, scales = a.static_zero, a.static_scale
    for t in range(tile.hi - tile.lo):
        skip = meta_at(spec, sizes.padded, t)
        source, out = x + t * x_row, mem.codes + (tile.begun + t) * sizes.row
        if spec.sharing == ROTATED:
            round_row(
                source, d, spec.group, rotate.levels, rotate.level_ends, spec.bits_x2,
                zeros + skip, out,
            )  # fmt: skip
            continue
        encode_row(
            source, sizes.row, spec.sharing, spec.group, a.tables.group_of, zeros + skip,
            scales + skip, spec.top, out,
        )  # fmt: skip


@kernel_step
def join_tile(a, sizes, tile, mem):  # type: ignore[no-untyped-def]
    """Join the codes of the tile into bytes, 0 after the last token."""
    spec, code_stride, row = a.spec, sizes.row, a.codes.row
    tokens = tile.begun + tile.hi - tile.lo
    blocks = -(-tokens // spec.per_block)
    for i in range(tokens * code_stride, blocks * spec.per_block * code_stride, 16):
        put_codes(mem.codes + i, splat(np.float32(0.0)))
    for block in range(blocks):
        for i in range(a.joint_heads):
            out = tile.codes + i * a.codes.head + block * spec.block_rows * row
            source = mem.codes + block * spec.per_block * code_stride + i * sizes.padded
            join_block(source, code_stride, a.head_dim, spec.bits_x2, out, row)


@cache
def unpacking() -> Kernel:
    """Compile the kernel that unpacks; see `unpack` for its call."""
    layout = PACK.dtype

    def unpack(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        spec, sizes = a.spec, sizes_of(a)
        ranges = spec.tile // spec.group + 1 if spec.sharing == CHANNEL else spec.tile
        metas = 32 if spec.sharing == STATIC else (ranges * spec.groups + 31) // 16 * 16
        room = 2 * sizes.row + 2 * metas + (spec.tile + 16) * sizes.row // 4 + 16
        memory = np.empty(room, np.float32)
        wide = (memory.ctypes.data + 63) // 64 * 64
        low = wide + 4 * sizes.row
        spare = low + 8 * metas
        mem = Scratch(wide, low, low + 4 * metas, spare, spare + 4 * sizes.row)
        while True:
            task = count(args)
            if task >= sizes.tasks:
                break
            tile = tile_of(a, sizes, task)
            if spec.sharing != STATIC:
                read_metadata(a, sizes, tile, mem)
            split_tile(a, sizes, tile, mem)
            if spec.sharing == ROTATED:
                restore_tile(a, sizes, tile, mem)
            else:
                decode_tile(a, sizes, tile, mem)
        memory[0] = 0.0  # keeps the array alive: Numba frees it after its last use

    return Kernel(unpack, "unpack")


@kernel_step
def first_token(spec, lo):  # type: ignore[no-untyped-def]
    """Return the first token whose numbers are in the row of scales of token lo."""
    return lo // spec.group * spec.group if spec.sharing == CHANNEL else lo


@kernel_step
def read_metadata(a, sizes, tile, mem):  # type: ignore[no-untyped-def]
    """Write scales and zeros in fp32, row by row where a row has those of several tokens."""
    spec, size, begin = a.spec, size_of(a.spec.meta), first_token(a.spec, tile.lo)
    tokens, numbers = tile.hi - begin, (tile.hi - begin) * spec.groups
    if spec.sharing == CHANNEL:
        tokens, numbers = spec.group, a.head_dim
    first = begin // tokens if spec.sharing == CHANNEL else begin
    for t in range(begin, tile.hi, tokens):
        skip, row_offset = meta_at(spec, sizes.padded, t - begin), first * sizes.meta_row
        if spec.sharing != ROTATED:
            widen(tile.zero + row_offset, size, spec.meta, numbers, mem.low + skip)
        widen(tile.scale + row_offset, size, spec.meta, numbers, mem.high + skip)
        first += 1


@kernel_step
def split_tile(a, sizes, tile, mem):  # type: ignore[no-untyped-def]
    """Split the bytes of the tile's pack blocks into codes."""
    spec, code_stride, row = a.spec, sizes.row, a.codes.row
    for block in range(-(-(tile.begun + tile.hi - tile.lo) // spec.per_block)):
        for i in range(a.joint_heads):
            source = tile.codes + i * a.codes.head + block * spec.block_rows * row
            out = mem.codes + block * spec.per_block * code_stride + i * sizes.padded
            split_block(source, row, a.head_dim, spec.bits_x2, out, code_stride)


@kernel_step
def restore_tile(a, sizes, tile, mem):  # type: ignore[no-untyped-def]
    """Write the tokens of the tile, whose channels were rotated in groups."""
    spec, rotate, d, spare = a.spec, a.rotation, a.head_dim, mem.spare
    group, bits_x2, levels = spec.group, spec.bits_x2, rotate.levels
    size, signs, mix = rotate.size, rotate.signs, rotate.mix
    for t in range(tile.hi - tile.lo):
        codes = mem.codes + (tile.begun + t) * sizes.row
        scale = mem.high + meta_at(spec, sizes.padded, t)
        restore_row(codes, d, group, size, signs, mix, levels, bits_x2, spare, scale, mem.wide)
        write_token(a, sizes, tile, t, mem.wide)


@kernel_step
def decode_tile(a, sizes, tile, mem):  # type: ignore[no-untyped-def]
    """Write the tokens of the tile."""
    spec, tables, rotate, d = a.spec, a.tables, a.rotation, a.head_dim
    sharing, group, group_of, divisor = spec.sharing, spec.group, tables.group_of, tables.divisor
    zeros, scales = mem.low, mem.high
    if sharing == STATIC:
        zeros, scales = a.static_zero, a.static_scale
    skipped = tile.lo - first_token(spec, tile.lo)  # tokens of its first row of scales before it
    for t in range(tile.hi - tile.lo):
        codes, skip = (
            mem.codes + (tile.begun + t) * sizes.row,
            meta_at(spec, sizes.padded, skipped + t),
        )
        decode_row(
            codes, sizes.row, sharing, group, group_of, zeros + skip, scales + skip, divisor,
            mem.wide,
        )  # fmt: skip
        if rotate.size != 0:
            unrotate_group(mem.wide, d, rotate.size, rotate.signs, rotate.mix, mem.spare)
        write_token(a, sizes, tile, t, mem.wide)


@kernel_step
def write_token(a, sizes, tile, t, x):  # type: ignore[no-untyped-def]
    """Write token t of the tile, x fp32, to where the call wants it, at its position."""
    row = tile.lo + t - a.begin
    for i in range(a.joint_heads):
        source = x + 4 * i * sizes.padded
        rotate_to_position(a.rope, source, tile.b, tile.h + i, row)
        out = head_address(a.x, tile.b, tile.h + i) + row * a.x.row
        narrow(source, a.head_dim, a.dtype_code, out)
