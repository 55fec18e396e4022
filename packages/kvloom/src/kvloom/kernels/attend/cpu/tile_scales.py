"""S and Z of a tile of packed tokens (see `dequant`), as steps of the decode kernel.

Everything is read and written by address; callers own the memory. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cpu_runtime import kernel_step
from ...simd import fma, load_any, load_one, splat, store, store_one
from .variant import Variant


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
