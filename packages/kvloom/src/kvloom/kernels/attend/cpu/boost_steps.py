"""Queries for keys of which some channels have two more bits, see `quantize.boosted`.

A boosted channel has a negative scale. Its low bits are in columns behind the last channel, where
the query has a quarter of what it has for the high bits. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...cpu_runtime import kernel_step
from ...simd import I64, Lanes, call, fma, load, load_any, load_one, made, same, store, store_one


@intrinsic
def negative(ctx: Any, x: Any) -> Any:
    """Return which lanes are below 0, a bit each."""

    def emit(b: Any, x: Any) -> Any:
        below = b.fcmp_ordered("<", x, same(0.0))
        return b.zext(b.bitcast(below, ir.IntType(16)), I64)

    return made(types.int64(Lanes), emit)


@intrinsic
def lowest(ctx: Any, bits: Any) -> Any:
    """Return the number of the lowest bit that is set."""
    return made(
        types.int64(types.int64),
        lambda b, x: call(b, "llvm.cttz.i64", I64, x, ir.Constant(ir.IntType(1), 1)),
    )


@kernel_step
def fold_low_bits(scale, w, d, boost, meta, size, minus, folded, begin):  # type: ignore[no-untyped-def]
    """Write the columns of w folded queries for low bits, and add to what their sums begin with.

    scale: stored, of d channels. folded: fp32 [w, d + boost], of which the first d are written.
    minus, begin: as in `score_tile.fold_scales`.
    """
    row, j = 4 * (d + boost), d
    for block in range(0, d, 16):
        bits = negative(load_any(scale + block * size, meta))
        while bits != 0:
            c = block + lowest(bits)
            bits &= bits - 1
            for i in range(w):
                x = load_one(folded + i * row + 4 * c, 0)
                store_one(folded + i * row + 4 * j, x * np.float32(0.25))
            j += 1
    for c in range(j, d + boost):
        for i in range(w):
            store_one(folded + i * row + 4 * c, np.float32(0.0))
    for i in range(w):
        const = load(begin + 64 * i)
        for c in range(d, d + boost, 16):
            const = fma(load(folded + i * row + 4 * c), minus, const)
        store(begin + 64 * i, const)
