"""Which tokens a task packs or unpacks, and where their numbers, scales and codes are.

Decides nothing about a format's arithmetic. Importing this imports Numba.
"""

from __future__ import annotations

from typing import NamedTuple

from ...cpu_runtime import head_address, kernel_step
from .arguments import CHANNEL, STATIC
from .tiles import rope_row, size_of


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
    """Bytes from the first scale of a tile in fp32 to those of its token t."""
    if spec.sharing == CHANNEL:
        return 4 * (t // spec.group * padded)
    return 0 if spec.sharing == STATIC else 4 * t * spec.groups


@kernel_step
def rotate_to_position(rope, x, b, h, t):  # type: ignore[no-untyped-def]
    """Rotate one token of a head, fp32, by the angles of the call's token t, if there are any."""
    if rope.cos != 0:
        angle = b * rope.batch + h * rope.head + 4 * t * rope.half
        rope_row(x, rope.cos + angle, rope.sin + angle, rope.half, rope.interleaved != 0)
