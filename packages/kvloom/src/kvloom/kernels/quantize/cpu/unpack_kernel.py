"""The kernel that unpacks tokens: one for all formats.

Decides the order of steps; `tiles` has those of a row. Tasks are as in `pack_kernel`. Formula and
byte layout: `reference`; tolerance: none, numbers are the reference's to the last bit.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from ...cpu_runtime import Kernel, count, head_address, kernel_step, read_arguments
from .arguments import CHANNEL, PACK, ROTATED, STATIC
from .rotation_steps import restore_row, unrotate_group
from .tile_layout import meta_at, rotate_to_position, sizes_of, tile_of
from .tiles import decode_row, narrow, size_of, split_block, widen


class Scratch(NamedTuple):
    """Addresses of a thread's own memory, fp32."""

    wide: int  # a row
    low: int  # zeros
    high: int  # scales
    spare: int  # a row
    codes: int  # of the tile, a byte each


@cache
def kernel() -> Kernel:
    """Compile the kernel; see `unpack` for its call."""
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
    """The first token whose numbers are in the row of scales of token lo."""
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
