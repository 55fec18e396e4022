"""Scores and weighted sums of a tile of tokens, as steps that are compiled into attention kernels.

Decides how packed tokens, group by group, and exact tokens are multiplied with queries and added
up. A factory closes a step over the constants of a variant. Everything is read and written by
address; callers own the memory. S and Z are those of `dequant`. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...cpu_runtime import head_address, kernel_step, load_int
from ...simd import fma, load, load_any, load_one, splat, store, store_one
from . import lookup
from .arguments import BEFORE, FAR
from .lookup import tabled
from .microkernel import rotate_queries, scores, values
from .variant import CHANNEL, NONE, TABLE, SideConstants, Variant


class HeadView(NamedTuple):
    """Where the tokens of a head are; rows are in bytes."""

    codes: int
    row: int
    packed_tokens: int  # of the prefix
    scale: int
    zero: int
    meta_row: int
    table: int
    tail: int
    tail_row: int


@kernel_step
def head_view(side, b, h, size):  # type: ignore[no-untyped-def]
    """Return the `HeadView` of head h in batch row b.

    side: a record of `SIDE`. size: bytes of a scale if a head's scales begin at its `first_group`
    among those of all heads, else 0.
    """
    prefix = side.prefix
    scale, zero = head_address(prefix.scale, b, h), head_address(prefix.zero, b, h)
    if size and side.packed_tokens > 0:
        first = size * load_int(prefix.first_group, h)
        scale += first
        zero += first
    return HeadView(
        head_address(prefix.codes, b, h), prefix.codes.row, side.packed_tokens, scale, zero,
        prefix.meta_row, prefix.table + h * prefix.table_head, head_address(side.tail, b, h),
        side.tail.row,
    )  # fmt: skip


@kernel_step
def moved(view, codes, scale, zero, tail):  # type: ignore[no-untyped-def]
    """Return a view whose parts begin so many bytes further on."""
    return HeadView(
        view.codes + codes, view.row, view.packed_tokens, view.scale + scale, view.zero + zero,
        view.meta_row, view.table, view.tail + tail, view.tail_row,
    )  # fmt: skip


@kernel_step
def with_packed(view, packed_tokens, table):  # type: ignore[no-untyped-def]
    """Return a view with another number of packed tokens and another table."""
    return HeadView(
        view.codes, view.row, packed_tokens, view.scale, view.zero, view.meta_row, table, view.tail,
        view.tail_row,
    )  # fmt: skip


@kernel_step
def affine(scale, zero, count, factor, offset, dtype_code, size, out, z_offset):  # type: ignore[no-untyped-def]
    """Write S = factor * scale and Z = zero + offset * S, `z_offset` bytes after S."""
    even = count // 16 * 16
    for i in range(0, even, 16):
        big = load_any(scale + i * size, dtype_code) * splat(np.float32(factor))
        store(out + 4 * i, big)
        off = fma(big, splat(np.float32(offset)), load_any(zero + i * size, dtype_code))
        store(out + z_offset + 4 * i, off)
    for i in range(even, count):
        big_one = load_one(scale + i * size, dtype_code) * np.float32(factor)
        store_one(out + 4 * i, big_one)
        shift = big_one * np.float32(offset)
        store_one(out + z_offset + 4 * i, load_one(zero + i * size, dtype_code) + shift)


@kernel_step
def widen(scale, count, dtype_code, size, out):  # type: ignore[no-untyped-def]
    """Write scales in fp32, for formats without a zero."""
    even = count // 16 * 16
    for i in range(0, even, 16):
        store(out + 4 * i, load_any(scale + i * size, dtype_code))
    for i in range(even, count):
        store_one(out + 4 * i, load_one(scale + i * size, dtype_code))


@kernel_step
def clear(out, z_offset, begin, end):  # type: ignore[no-untyped-def]
    """Set S = Z = 0 for numbers begin to end."""
    for j in range(begin, end):
        store_one(out + 4 * j, np.float32(0.0))
        store_one(out + z_offset + 4 * j, np.float32(0.0))


@kernel_step
def copy_rows(source, source_row, target, target_row, rows, n):  # type: ignore[no-untyped-def]
    """Copy the first n numbers of some rows; rows are in bytes."""
    for i in range(rows):
        for j in range(n):
            store_one(target + i * target_row + 4 * j, load_one(source + i * source_row + 4 * j, 0))


def scales_of_tile(variant: Variant, side: int) -> Any:
    """Make the step that writes the S and Z of packed keys (0) or values (1) per token."""
    constants, z_offset = variant.sides[side], variant.z_offset
    meta, size, across = constants.meta, constants.meta_size, constants.across
    factor, offset, levels = constants.factor, constants.offset, constants.levels
    per_token, adjacent = constants.per_token, constants.adjacent

    @kernel_step
    def write(view, lo, n, out):  # type: ignore[no-untyped-def]
        """Write S, and Z `z_offset` bytes after it, of n tokens from number lo on."""
        row = view.meta_row
        if per_token and adjacent and levels:
            widen(view.scale + lo * row, n * across, meta, size, out)
        elif per_token and adjacent:
            scale, zero = view.scale + lo * row, view.zero + lo * row
            affine(scale, zero, n * across, factor, offset, meta, size, out, z_offset)
        elif per_token:
            for j in range(n):
                scale, zero = view.scale + (lo + j) * row, view.zero + (lo + j) * row
                target = out + 4 * j * across
                affine(scale, zero, across, factor, offset, meta, size, target, z_offset)

    return write


@kernel_step
def fold_scales(q, w, d, scale, zero, meta, size, factor, minus, folded, begin):  # type: ignore[no-untyped-def]
    """Multiply w queries by the S of a group of channels, and write what their sums begin with.

    q . (x * S + Z) = (q * S) . x + q . Z, with Z = zero - S: `minus` times the rounded q * S makes
    the 1 of x cancel. folded: fp32 [w, d].
    """
    for i in range(w):
        const = splat(np.float32(0.0))
        for c in range(0, d, 16):
            x = load(q + 4 * (i * d + c))
            x_big = x * (load_any(scale + c * size, meta) * splat(np.float32(factor)))
            store(folded + 4 * (i * d + c), x_big)
            const = fma(x_big, minus, const)
            const = fma(x, load_any(zero + c * size, meta), const)
        store(begin + 64 * i, const)


@kernel_step
def clear_begin(begin, w):  # type: ignore[no-untyped-def]
    """Let the sums of w rows begin with 0."""
    for i in range(w):
        store(begin + 64 * i, splat(np.float32(0.0)))


def score_exact(variant: Variant) -> Any:
    """Make the step that scores exact tokens."""
    d, w, z_offset, s_row = variant.d, variant.w, variant.z_offset, variant.logits_row
    at_once, literal = 16 // w, SideConstants(exact_dtype=variant.exact_dtype).literal

    @kernel_step
    def score(q, base, row, first, last, mem):  # type: ignore[no-untyped-def]
        """Score the tile's tokens first to last; the tile's number 0 would be at `base`."""
        even = first + (last - first) // at_once * at_once
        for j in range(first, even, at_once):
            scores(
                q, mem.begin, base + j * row, row, mem.logits + 4 * j, s_row, mem.scales,
                z_offset, 0, 0, d, w, at_once, literal,
            )  # fmt: skip
        for j in range(even, last):
            scores(
                q, mem.begin, base + j * row, row, mem.logits + 4 * j, s_row, mem.scales,
                z_offset, 0, 0, d, w, 1, literal,
            )  # fmt: skip

    return score


def score_packed(variant: Variant) -> Any:
    """Make the step that scores packed keys."""
    constants, d, w, z_offset = variant.keys, variant.d, variant.w, variant.z_offset
    span, meta, size = variant.tokens_at_once(constants), constants.meta, constants.meta_size
    rope, rope_row, literal = constants.rope_dims, 8 * d, _literal(constants)
    factor, offset = constants.factor, constants.offset
    by_channel, folds = constants.by == CHANNEL, constants.folds
    write_scales, score_group = scales_of_tile(variant, 0), _score_group(variant)

    @kernel_step
    def score(a, keys, q, lo, n, position, mem):  # type: ignore[no-untyped-def]
        """Score the tile's first n tokens, packed, from number lo on, which is at `position`."""
        far_steps = max(-BEFORE, position // FAR)  # multiples of FAR, and the rest
        near_steps = max(0, position - far_steps * FAR)
        if rope:
            rotate_queries(q, mem.far, a.far + (far_steps + BEFORE) * rope_row, d, w, literal)
        write_scales(keys, lo, n, mem.scales)
        for g in range(0, n, span):
            group_q, tokens, row = q, min(span, n - g), (lo + g) // span * keys.meta_row
            scale, zero = keys.scale + row, keys.zero + row
            if folds:
                group_q, minus = mem.folded, splat(np.float32(offset))
                fold_scales(
                    q, w, d, scale, zero, meta, size, factor, minus, group_q, mem.begin
                )  # fmt: skip
            elif by_channel:
                affine(scale, zero, d, factor, offset, meta, size, mem.scales, z_offset)
            score_group(a, keys, group_q, lo, g, tokens, near_steps, mem)
        if folds:
            clear_begin(mem.begin, w)

    return score


def _score_group(variant: Variant) -> Any:
    """Make the step that scores the tokens of a tile that share metadata."""
    constants, d, w, s_row = variant.keys, variant.d, variant.w, variant.logits_row
    per_block, height = constants.per_block
    rope, rope_row, literal = constants.rope_dims, 8 * d, _literal(constants)
    # pack blocks that share a rotated query, or tables
    run_blocks = max(1, 16 // per_block) if rope or constants.by == TABLE else variant.tile
    score_blocks = _score_blocks(variant)

    @kernel_step
    def score(a, keys, q, lo, g, tokens, near_steps, mem):  # type: ignore[no-untyped-def]
        """Score `tokens` tokens of the tile at lo, from its number g on."""
        skip = (lo + g) % per_block  # tokens of the first pack block before the group
        base = keys.codes + (lo + g) // per_block * height * keys.row
        out = mem.logits + 4 * (g - skip)
        copy_rows(out, s_row, mem.rest, 64, w, skip)
        blocks = -(-(skip + tokens) // per_block)
        for first in range(0, blocks, run_blocks):
            last = min(first + run_blocks, blocks)
            if rope:
                row = a.near + (near_steps + g - skip + first * per_block) * rope_row
                rotate_queries(mem.far, mem.rotated, row, d, w, literal)
                q = mem.rotated
            score_blocks(a, keys, q, base, out, first, last, mem)
        copy_rows(mem.rest, 64, out, s_row, w, skip)

    return score


def _score_blocks(variant: Variant) -> Any:
    """Make the step that scores pack blocks which share a rotated query, or tables."""
    constants, literal, d, w = variant.keys, _literal(variant.keys), variant.d, variant.w
    (per_block, height), across = constants.per_block, constants.across
    z_offset, s_row = variant.z_offset, variant.logits_row
    at_once, rope_row = max(1, 16 // (w * per_block)), 8 * d
    by_table, table_size = constants.by == TABLE, lookup.SIZE

    @kernel_step
    def score(a, keys, q, base, out, first, last, mem):  # type: ignore[no-untyped-def]
        """Write scores of blocks first to last: of block 0, which is at `base`, to `out`."""
        meta, step = mem.scales + 4 * first * per_block * across, 4 * per_block * across
        if by_table:
            tabled(meta, z_offset, (last - first) * per_block, mem.tables, literal)
            meta, step = mem.tables, per_block * table_size
        even = first + (last - first) // at_once * at_once
        for i in range(first, even, at_once):
            scores(
                q, mem.begin, base + i * height * keys.row, keys.row, out + 4 * i * per_block,
                s_row, meta + (i - first) * step, z_offset, keys.table,
                a.near + (i - first) * per_block * rope_row, d, w, at_once, literal,
            )  # fmt: skip
        for i in range(even, last):
            scores(
                q, mem.begin, base + i * height * keys.row, keys.row, out + 4 * i * per_block,
                s_row, meta + (i - first) * step, z_offset, keys.table,
                a.near + (i - first) * per_block * rope_row, d, w, 1, literal,
            )  # fmt: skip

    return score


def _literal(constants: SideConstants) -> int:
    """Return how keys become numbers where queries have been prepared for them."""
    return constants._replace(by=NONE).literal if constants.folds else constants.literal


def sum_exact(variant: Variant) -> Any:
    """Make the step that adds exact tokens."""
    d, w, z_offset, s_row = variant.d, variant.w, variant.z_offset, variant.logits_row
    literal = SideConstants(exact_dtype=variant.exact_dtype).literal

    @kernel_step
    def add(base, row, first, last, out, mem):  # type: ignore[no-untyped-def]
        """Add the tile's tokens first to last; the tile's number 0 would be at `base`."""
        weights, begin, count = mem.logits + 4 * first, base + first * row, last - first
        values(weights, s_row, begin, row, count, out, mem.scales, z_offset, 0, d, w, literal)

    return add


def sum_packed(variant: Variant) -> Any:
    """Make the step that adds packed values."""
    constants, d, z_offset = variant.values, variant.d, variant.z_offset
    span, per_block = variant.tokens_at_once(constants), constants.per_block[0]
    meta, size = constants.meta, constants.meta_size
    factor, offset = constants.factor, constants.offset
    by_channel, per_token, across = constants.by == CHANNEL, constants.per_token, constants.across
    write_scales, add_group = scales_of_tile(variant, 1), _add_group(variant)

    @kernel_step
    def add(view, lo, n, out, mem):  # type: ignore[no-untyped-def]
        """Add the tile's first n tokens, packed, from number lo on."""
        write_scales(view, lo, n, mem.scales)
        if per_token:
            clear(mem.scales, z_offset, n * across, -(-n // per_block) * per_block * across)
        for g in range(0, n, span):
            row = (lo + g) // span * view.meta_row
            if by_channel:
                scale, zero = view.scale + row, view.zero + row
                affine(scale, zero, d, factor, offset, meta, size, mem.scales, z_offset)
            add_group(view, lo, g, min(span, n - g), out, mem)

    return add


def _add_group(variant: Variant) -> Any:
    """Make the step that adds the tokens of a tile that share metadata."""
    constants, d, w, z_offset = variant.values, variant.d, variant.w, variant.z_offset
    s_row, across, literal = variant.logits_row, constants.across, constants.literal
    per_block, height = constants.per_block

    @kernel_step
    def add(view, lo, g, tokens, out, mem):  # type: ignore[no-untyped-def]
        """Add `tokens` tokens of the tile at lo, from its number g on."""
        skip = (lo + g) % per_block  # tokens of the first pack block before the group
        end = skip + tokens
        base, block = view.codes + (lo + g) // per_block * height * view.row, height * view.row
        weights, scales = mem.logits + 4 * (g - skip), mem.scales + 4 * (g - skip) * across
        front, full = (1 if skip > 0 else 0), end // per_block
        values(
            weights + 4 * front * per_block, s_row, base + front * block, view.row, full - front,
            out, scales + 4 * front * per_block * across, z_offset, view.table, d, w, literal,
        )  # fmt: skip
        # pack blocks that also hold tokens of another group, or exact ones
        for edge in range(2):
            if (skip if edge == 0 else end % per_block) == 0:
                continue
            past = edge * full * per_block
            copy_between(weights + 4 * past, s_row, mem.rest, w, per_block, skip - past, end - past)
            values(
                mem.rest, 64, base + edge * full * block, view.row, 1, out,
                scales + 4 * past * across, z_offset, view.table, d, w, literal,
            )  # fmt: skip

    return add


@kernel_step
def copy_between(weights, s_row, out, rows, n, first, last):  # type: ignore[no-untyped-def]
    """Copy the first n numbers of some rows; 0 before number `first`, and from `last` on."""
    for i in range(rows):
        for j in range(n):
            x = np.float32(0.0)
            if first <= j < last:
                x = load_one(weights + i * s_row + 4 * j, 0)
            store_one(out + 64 * i + 4 * j, x)
