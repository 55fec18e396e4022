"""Weighted sums of a tile's values, as steps that are compiled into the decode kernel.

Decides how packed values, group by group, and exact values are added up. A factory closes a step
over the constants of a variant. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cpu_runtime import kernel_step
from ...simd import load_one, store_one
from .microkernel import values
from .tile_scales import affine, clear, scales_of_tile
from .variant import CHANNEL, SideConstants, Variant


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
    span, per_block = variant.span(constants), constants.per_block[0]
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
