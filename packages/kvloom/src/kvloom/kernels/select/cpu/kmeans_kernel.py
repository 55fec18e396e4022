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

from ...cpu_runtime import Kernel, count, load_int, store_int
from ...cpu_runtime import arguments as read_arguments
from ...cpu_runtime import at as head_address
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
    at,
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


def takes_pairs(d: int, number: int) -> bool:
    """Whether keys of d numbers of a format are multiplied in pairs."""
    return number == BF16 and d % 32 == 0 and has_pairs()


@intrinsic(prefer_literal=True)
def _meet(
    ctx: Any, x: Any, panel: Any, offset: Any, base: Any, best: Any, d: Any, pairs: Any
) -> Any:
    """Let `ROWS` keys fp32 [ROWS, d] meet a panel fp32 [d, 32] and offsets fp32 [32].

    base: the number of the panel's first centroid. best: of each key the best values [16] so far
    and their centroids int32 [16], lane by lane. pairs: d counts pairs of bf16 numbers.
    """
    n_d, step = d.literal_value, 4
    meet = muladd_pairs if pairs.literal_value else muladd

    def emit(b: Any, x: Any, panel: Any, offset: Any, base: Any, best: Any, *_: Any) -> None:
        def add(i: Any, sums: list[Any]) -> list[Any]:
            here = b.mul(i, ir.Constant(I64, 4 * step))
            key, row = b.add(x, here), b.add(panel, b.mul(here, ir.Constant(I64, PANEL)))
            for u in range(step):
                ws = [read(b, at(b, row, 4 * PANEL * u + 64 * v), VF) for v in range(2)]
                for m in range(ROWS):  # one broadcast at a time: sums take most registers
                    one = broadcast(b, read(b, at(b, key, 4 * (m * n_d + u)), F32))
                    for v in range(2):
                        sums[2 * m + v] = meet(b, ws[v], one, sums[2 * m + v])
            return sums

        start = [read(b, at(b, offset, 64 * v), VF) for v in range(2)]
        sums = loop(b, ir.Constant(I64, n_d // step), start * ROWS, add)
        first = broadcast(b, b.trunc(base, I32))
        lane = b.add(first, ir.Constant(VI, list(range(WIDTH))))
        for m in range(ROWS):
            top, who = read(b, at(b, best, 128 * m), VF), read(b, at(b, best, 128 * m + 64), VI)
            for v, new in enumerate(sums[2 * m : 2 * m + 2]):
                better = b.fcmp_ordered(">", new, top)
                top = b.select(better, new, top)
                who = b.select(better, b.add(lane, constant(v * WIDTH, VI)), who)
            write(b, at(b, best, 128 * m), top)
            write(b, at(b, best, 128 * m + 64), who)

    return lowered(types.void(*[types.int64] * 5, d, pairs), emit)


@cache
def nearest(d: int, number: int, pairs: bool) -> Any:
    """Compile the assignment of keys of a number format; see `select.nearest` for the call."""
    size = SIZE[number]
    words_ = d // 2 if pairs else d  # of a key, four bytes each
    kind = FP32 if pairs else number  # what a word is read as
    across = 4 if pairs else size
    layout = NEAREST.dtype

    def assign(job):  # type: ignore[no-untyped-def]
        a = read_arguments(job, layout)
        hk, n, panels, weights, offsets = a.kv_heads, a.tokens, a.panels, a.weights, a.offsets
        row = a.x.row
        parts = -(-n // TOKENS)
        scratch = np.zeros(TOKENS * (words_ + 32) + 16, np.float32)
        keys = (scratch.ctypes.data + 63) // 64 * 64
        best = keys + 4 * TOKENS * words_
        zero16, minus = splat(np.float32(0.0)), splat(np.float32(-np.inf))
        while True:
            task = count(job)
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
                        store(keys + 4 * (j * words_ + v), load_any(x + j * row + v * across, kind))
            for p in range(panels):
                at_head = head * panels + p
                for j in range(0, many, ROWS):
                    _meet(
                        keys + 4 * j * words_, weights + 4 * at_head * words_ * PANEL,
                        offsets + 4 * at_head * PANEL, p * PANEL, best + 128 * j, words_, pairs,
                    )  # fmt: skip
            for j in range(many):
                top, who = np.float32(-np.inf), 0
                for i in range(WIDTH):
                    value = load_one(best + 128 * j + 4 * i, 0)
                    it = load_i32(best + 128 * j + 64 + 4 * i)
                    if value > top or (value == top and it < who):
                        top, who = value, it
                store_int(a.labels + 8 * (head * n + lo + j), who)
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(assign, f"nearest {d}, {number}, {pairs}")


@cache
def sums(d: int, number: int) -> Any:
    """Compile the sums of clusters; see `select.means` for the call."""
    size = SIZE[number]
    layout = SUM.dtype

    def sum_up(job):  # type: ignore[no-untyped-def]
        a = read_arguments(job, layout)
        hk, n, clusters, row = a.kv_heads, a.tokens, a.clusters, a.x.row
        while True:
            head = count(job)
            if head >= a.heads:
                break
            x = head_address(a.x, head // hk, head % hk)
            for j in range(n):
                label = load_int(a.labels, head * n + j)
                if label < clusters:
                    to = a.sums + 4 * d * (head * clusters + label)
                    for v in range(0, d, 16):
                        y = load_any(x + j * row + v * size, number)
                        store(to + 4 * v, load(to + 4 * v) + y)

    return Kernel(sum_up, f"sums {d}, {number}")
