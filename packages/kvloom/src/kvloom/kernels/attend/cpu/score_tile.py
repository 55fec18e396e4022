"""Scores of a tile of tokens, as steps of the decode kernel that are compiled into it.

Decides how packed keys, group by group, and exact keys are multiplied with queries. A factory
closes a step over the constants of a variant. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cpu_runtime import kernel_step
from ...simd import fma, load, load_any, splat, store
from . import lookup
from .lookup import tabled
from .microkernel import rotate_queries, scores
from .rope_tables import BEFORE, FAR
from .tile_scales import affine, copy_rows, scales_of_tile
from .variant import CHANNEL, NONE, TABLE, SideConstants, Variant


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
                z_offset,                 0, 0, d, w, at_once, literal,
            )  # fmt: skip
        for j in range(even, last):
            scores(
                q, mem.begin, base + j * row, row, mem.logits + 4 * j, s_row, mem.scales,
                z_offset,                 0, 0, d, w, 1, literal,
            )  # fmt: skip

    return score


def score_packed(variant: Variant) -> Any:
    """Make the step that scores packed keys."""
    constants, d, w, z_offset = variant.keys, variant.d, variant.w, variant.z_offset
    span, meta, size = variant.span(constants), constants.meta, constants.meta_size
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
        """Write the scores of blocks first to last; block 0 is at `base`, its scores go to `to`."""
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
