"""S and Z of a tile of packed tokens (see `dequant`), as steps of the decode kernel.

Everything is read and written by address; callers own the memory. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cpu_runtime import kernel_step
from ...simd import fma, load, load_any, load_one, splat, store, store_one
from .variant import Variant


@kernel_step
def affine(scale, zero, count, factor, offset, kind, size, out, gap):  # type: ignore[no-untyped-def]
    """Write S = factor * scale and Z = zero + offset * S, `gap` bytes behind S."""
    even = count // 16 * 16
    for i in range(0, even, 16):
        big = load_any(scale + i * size, kind) * splat(np.float32(factor))
        store(out + 4 * i, big)
        off = fma(big, splat(np.float32(offset)), load_any(zero + i * size, kind))
        store(out + gap + 4 * i, off)
    for i in range(even, count):
        one = load_one(scale + i * size, kind) * np.float32(factor)
        store_one(out + 4 * i, one)
        more = one * np.float32(offset)
        store_one(out + gap + 4 * i, load_one(zero + i * size, kind) + more)


@kernel_step
def widen(scale, count, kind, size, out):  # type: ignore[no-untyped-def]
    """Write scales in fp32, for formats without a zero."""
    even = count // 16 * 16
    for i in range(0, even, 16):
        store(out + 4 * i, load_any(scale + i * size, kind))
    for i in range(even, count):
        store_one(out + 4 * i, load_one(scale + i * size, kind))


@kernel_step
def clear(out, gap, begin, end):  # type: ignore[no-untyped-def]
    """Set S = Z = 0 for numbers begin to end."""
    for j in range(begin, end):
        store_one(out + 4 * j, np.float32(0.0))
        store_one(out + gap + 4 * j, np.float32(0.0))


@kernel_step
def tile_rows(scale, zero, row, lo, n, span, factor, offset, kind, size, out, gap):  # type: ignore[no-untyped-def]
    """Write S and Z as `tile_scales`, of tokens of which `span` have their numbers in one row."""
    for j in range(0, n, span):
        here, count = (lo + j) // span * row, min(span, n - j)
        affine(scale + here, zero + here, count, factor, offset, kind, size, out + 4 * j, gap)


@kernel_step
def multiply_tokens(s, s_row, w, count, factor, kind, size):  # type: ignore[no-untyped-def]
    """Multiply w rows of numbers of `count` tokens, whole vectors, by the tokens' factors."""
    for j in range(0, count, 16):
        one = load_any(factor + j * size, kind)
        for i in range(w):
            here = s + i * s_row + 4 * j
            store(here, load(here) * one)


@kernel_step
def add_channels(x, w, d, factor, kind, size, to):  # type: ignore[no-untyped-def]
    """Add x fp32 [w, d] times the channels' factors to `to`, and clear x."""
    zero16 = splat(np.float32(0.0))
    for i in range(w):
        for c in range(0, d, 16):
            here, there = x + 4 * (i * d + c), to + 4 * (i * d + c)
            store(there, fma(load(here), load_any(factor + c * size, kind), load(there)))
            store(here, zero16)


@kernel_step
def copy_rows(source, source_row, to, to_row, rows, n):  # type: ignore[no-untyped-def]
    """Copy the first n numbers of some rows; rows are in bytes."""
    for i in range(rows):
        for j in range(n):
            store_one(to + i * to_row + 4 * j, load_one(source + i * source_row + 4 * j, 0))


def scales_of_tile(variant: Variant, side: int) -> Any:
    """Make the step that writes the S and Z of packed keys (0) or values (1) per token."""
    form, gap = variant.form(side), variant.scales_gap
    meta, size, across, levels = form.meta, form.size, form.spec.across, form.spec.levels
    factor, offset, joint, strewn = form.spec.factor, form.spec.offset, form.joint, form.strewn

    @kernel_step
    def write(view, lo, n, out):  # type: ignore[no-untyped-def]
        """Write S, and Z `gap` bytes behind it, of n tokens from number lo on."""
        row = view.meta_row
        if joint and levels:
            widen(view.scale + lo * row, n * across, meta, size, out)
        elif joint:
            scale, zero = view.scale + lo * row, view.zero + lo * row
            affine(scale, zero, n * across, factor, offset, meta, size, out, gap)
        elif strewn:
            for j in range(n):
                scale, zero = view.scale + (lo + j) * row, view.zero + (lo + j) * row
                to = out + 4 * j * across
                affine(scale, zero, across, factor, offset, meta, size, to, gap)

    return write
