"""The K-means kernels: the nearest centroid of each key, and the sums of clusters.

Decides the blocking. Products of `ROWS` keys at a time with panels of 32 centroids stay in
registers. For each key the best product so far is kept lane by lane with its centroid, so products
are never written to memory. If the CPU multiplies pairs of bf16 numbers (AVX512-BF16), keys in bf16
are not widened. References: `reference.nearest`, which decides near ties by its own rounding, and
`reference.means`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

from ...cpu_runtime import Kernel, count, head_address, load_int, read_arguments, store_int
from ...simd import (
    BF16,
    F32,
    FP32,
    I32,
    I64,
    SIZE,
    VF,
    VI,
    WIDTH,
    add_bytes,
    broadcast,
    constant,
    has_pairs,
    load,
    load_any,
    load_i32,
    load_one,
    loop,
    lowered,
    muladd,
    muladd_pairs,
    read,
    splat,
    store,
    write,
)
from .arguments import NEAREST, SUM

PANEL = 2 * WIDTH  # centroids whose products are taken together
# Keys beside them: as many as leave room in the registers, 32 of sixteen lanes or fewer.
_HAS = binding.get_host_cpu_features()
ROWS = 12 if _HAS.get("avx512f") else 3
TOKENS = 96


def takes_pairs(d: int, dtype_code: int) -> bool:
    """Whether keys of d numbers of a format are multiplied in pairs."""
    return dtype_code == BF16 and d % 32 == 0 and has_pairs()


@intrinsic(prefer_literal=True)
def _update_nearest(
    ctx: Any, x: Any, panel: Any, offset: Any, base: Any, best: Any, d: Any, pairs: Any
) -> Any:
    """Compare `ROWS` keys fp32 [ROWS, d] with a panel fp32 [d, 32] and offsets fp32 [32].

    base: the number of the panel's first centroid. best: of each key the best values [16] so far
    and their centroids int32 [16], lane by lane. pairs: d counts pairs of bf16 numbers.
    """
    n_d, step = d.literal_value, 4
    add_product = muladd_pairs if pairs.literal_value else muladd

    def emit(b: Any, x: Any, panel: Any, offset: Any, base: Any, best: Any, *_: Any) -> None:
        def add(i: Any, sums: list[Any]) -> list[Any]:
            step_offset = b.mul(i, ir.Constant(I64, 4 * step))
            key = b.add(x, step_offset)
            row = b.add(panel, b.mul(step_offset, ir.Constant(I64, PANEL)))
            for u in range(step):
                ws = [read(b, add_bytes(b, row, 4 * PANEL * u + 64 * v), VF) for v in range(2)]
                for m in range(ROWS):  # one broadcast at a time: sums take most registers
                    channel = broadcast(b, read(b, add_bytes(b, key, 4 * (m * n_d + u)), F32))
                    for v in range(2):
                        sums[2 * m + v] = add_product(b, ws[v], channel, sums[2 * m + v])
            return sums

        start = [read(b, add_bytes(b, offset, 64 * v), VF) for v in range(2)]
        sums = loop(b, ir.Constant(I64, n_d // step), start * ROWS, add)
        first = broadcast(b, b.trunc(base, I32))
        lane = b.add(first, ir.Constant(VI, list(range(WIDTH))))
        for m in range(ROWS):
            top = read(b, add_bytes(b, best, 128 * m), VF)
            centroid = read(b, add_bytes(b, best, 128 * m + 64), VI)
            for v, new in enumerate(sums[2 * m : 2 * m + 2]):
                better = b.fcmp_ordered(">", new, top)
                top = b.select(better, new, top)
                centroid = b.select(better, b.add(lane, constant(v * WIDTH, VI)), centroid)
            write(b, add_bytes(b, best, 128 * m), top)
            write(b, add_bytes(b, best, 128 * m + 64), centroid)

    return lowered(types.void(*[types.int64] * 5, d, pairs), emit)


@cache
def nearest(d: int, dtype_code: int, pairs: bool) -> Any:
    """Compile the assignment of keys of a dtype; see `select.nearest` for the call."""
    size = SIZE[dtype_code]
    words_ = d // 2 if pairs else d  # of a key, four bytes each
    word_code = FP32 if pairs else dtype_code  # what a word is read as
    across = 4 if pairs else size
    layout = NEAREST.dtype

    def assign(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        hk, n, panels, weights, offsets = a.kv_heads, a.tokens, a.panels, a.weights, a.offsets
        row = a.x.row
        parts = -(-n // TOKENS)
        scratch = np.zeros(TOKENS * (words_ + 32) + 16, np.float32)
        keys = (scratch.ctypes.data + 63) // 64 * 64
        best = keys + 4 * TOKENS * words_
        zero16, minus = splat(np.float32(0.0)), splat(np.float32(-np.inf))
        while True:
            task = count(args)
            if task >= a.heads * parts:
                break
            head, part = task // parts, task % parts
            b, h = head // hk, head % hk
            lo = part * TOKENS
            many = min(TOKENS, n - lo)
            x = head_address(a.x, b, h) + lo * row
            for j in range(TOKENS):
                store(best + 128 * j, minus)
                store(best + 128 * j + 64, zero16)
                if j < many:
                    for v in range(0, words_, 16):
                        words = load_any(x + j * row + v * across, word_code)
                        store(keys + 4 * (j * words_ + v), words)
            for p in range(panels):
                panel = head * panels + p
                for j in range(0, many, ROWS):
                    _update_nearest(
                        keys + 4 * j * words_, weights + 4 * panel * words_ * PANEL,
                        offsets + 4 * panel * PANEL, p * PANEL, best + 128 * j, words_, pairs,
                    )  # fmt: skip
            for j in range(many):
                top, centroid = np.float32(-np.inf), 0
                for i in range(WIDTH):
                    value = load_one(best + 128 * j + 4 * i, 0)
                    candidate = load_i32(best + 128 * j + 64 + 4 * i)
                    if value > top or (value == top and candidate < centroid):
                        top, centroid = value, candidate
                store_int(a.labels + 8 * (head * n + lo + j), centroid)
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(assign, f"nearest {d}, {dtype_code}, {pairs}")


@cache
def sums(d: int, dtype_code: int) -> Any:
    """Compile the sums of clusters; see `select.means` for the call."""
    size = SIZE[dtype_code]
    layout = SUM.dtype

    def sum_up(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        hk, n, clusters, row = a.kv_heads, a.tokens, a.clusters, a.x.row
        while True:
            head = count(args)
            if head >= a.heads:
                break
            x = head_address(a.x, head // hk, head % hk)
            for j in range(n):
                label = load_int(a.labels, head * n + j)
                if label < clusters:
                    target = a.sums + 4 * d * (head * clusters + label)
                    for v in range(0, d, 16):
                        y = load_any(x + j * row + v * size, dtype_code)
                        store(target + 4 * v, load(target + 4 * v) + y)

    return Kernel(sum_up, f"sums {d}, {dtype_code}")
