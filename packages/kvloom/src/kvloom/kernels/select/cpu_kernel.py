"""The kernels that score clusters and pages, choose among them, bound pages, and cluster.

Decides the order of steps. Scores are products of a head's queries with every centroid, or with
both bounds of every page, whose sum bounds q . k; a task is a (batch row, key/value head, range of
clusters or pages). The best of a head's scores are taken one after the other from blocks whose
largest score is known, so nothing is sorted.

K-means: products of `ROWS` keys at a time with panels of 32 centroids stay in registers. For each
key the best product so far is kept lane by lane with its centroid, so products are never written to
memory. If the CPU multiplies pairs of bf16 numbers (AVX512-BF16), keys in bf16 are not widened.

Reference: `reference`; scores differ by rounding, choices are equal for equal scores; near ties of
centroids are decided by rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..attend.cpu.microkernel import scores
from ..attend.cpu.variant import SideConstants
from ..cpu_runtime import Kernel, count, head_address, load_int, read_arguments, store_int
from ..simd import (
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
    features,
    has_pairs,
    load,
    load_any,
    load_byte,
    load_i32,
    load_one,
    loop,
    lowered,
    max_lanes,
    maximum,
    minimum,
    muladd,
    muladd_pairs,
    prefetch,
    read,
    splat,
    store,
    store_one,
    write,
)
from .arguments import BOUND, NEAREST, SCORE, SELECT, SUM

RANGE = 64  # clusters or pages of a task
BLOCK = 128  # scores of which the largest is kept


class SelectVariant(NamedTuple):
    """What a scoring kernel is compiled for."""

    d: int
    w: int  # query rows at once
    dtype_code: int  # of centroids or bounds
    bounds: bool  # two bounds, not one centroid


@cache
def scoring(variant: SelectVariant) -> Any:
    """Compile the scoring kernel of a variant."""
    d, w, dtype_code, bounds = variant
    at_once, size = 16 // w, SIZE[dtype_code]
    literal = SideConstants(exact_dtype=dtype_code).literal
    layout = SCORE.dtype

    def score(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        hk, rows, n, q, q_low, out = a.kv_heads, a.rows, a.count, a.q, a.q_low, a.scores
        parts = -(-n // RANGE)
        minus = np.float32(-np.inf)
        scratch = np.zeros(16 * w + 16 * w + 16, np.float32)
        begin = (scratch.ctypes.data + 63) // 64 * 64
        low_scores = begin + 64 * w
        orow = 4 * n
        while True:
            task = count(args)
            if task >= a.heads * parts:
                break
            head, part = task // parts, task % parts
            b, h = head // hk, head % hk
            high, low = head_address(a.high, b, h), head_address(a.low, b, h)
            alive = head_address(a.alive, b, h)
            hrow, lrow = a.high.row, a.low.row
            lo = part * RANGE
            hi = min(n, lo + RANGE)
            even = lo + (hi - lo) // at_once * at_once
            for m0 in range(0, rows, w):
                row_offset = 4 * (head * rows + m0) * d
                row = out + (head * rows + m0) * orow
                for j in range(lo, even, at_once):
                    if m0 == 0 and j + 2 * at_once <= n:  # rows apart look like no stream
                        for t in range(0, at_once * d * size, 64):
                            prefetch(high + (j + at_once) * hrow + t)
                            if bounds:
                                prefetch(low + (j + at_once) * lrow + t)
                    scores(
                        q + row_offset, begin, high + j * hrow, hrow, row + 4 * j, orow, 0, 0,
                        0, 0, d, w, at_once, literal,
                    )  # fmt: skip
                    if bounds:
                        scores(
                            q_low + row_offset, begin, low + j * lrow, lrow, low_scores, 64, 0, 0,
                            0, 0, d, w, at_once, literal,
                        )  # fmt: skip
                        if w == 1:
                            store(row + 4 * j, load(row + 4 * j) + load(low_scores))
                        else:
                            for i in range(w):
                                for t in range(at_once):
                                    cell = row + i * orow + 4 * (j + t)
                                    y = load_one(cell, 0) + load_one(low_scores + 64 * i + 4 * t, 0)
                                    store_one(cell, y)
                for j in range(even, hi):
                    scores(
                        q + row_offset, begin, high + j * hrow, hrow, row + 4 * j, orow, 0, 0,
                        0, 0, d, w, 1, literal,
                    )  # fmt: skip
                    if bounds:
                        scores(
                            q_low + row_offset, begin, low + j * lrow, lrow, low_scores, 64, 0, 0,
                            0, 0, d, w, 1, literal,
                        )  # fmt: skip
                        for i in range(w):
                            cell = row + i * orow + 4 * j
                            store_one(cell, load_one(cell, 0) + load_one(low_scores + 64 * i, 0))
            for j in range(lo, hi):
                if bounds:
                    least = load_one(low + j * lrow, dtype_code)
                    dead = least > load_one(high + j * hrow, dtype_code)
                else:
                    dead = load_byte(alive + j) == 0
                if dead:
                    for m in range(rows):
                        store_one(out + (head * rows + m) * orow + 4 * j, minus)
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(score, f"scoring {variant}")


@cache
def selecting() -> Any:
    """Compile the choice of the best clusters or pages."""
    layout = SELECT.dtype

    def select(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        n, m, page, out, tokens = a.count, a.budget, a.page, a.slots, a.tokens
        turns = a.turns
        size, start, order = a.size, a.start, a.order
        lowest = np.float32(-np.inf)
        minus, blocks = splat(lowest), -(-n // BLOCK)
        scratch = np.empty(turns * (blocks * BLOCK + blocks) + 16, np.float32)
        copies = (scratch.ctypes.data + 63) // 64 * 64  # of each head's scores: -inf once taken
        all_tops = copies + 4 * turns * blocks * BLOCK
        taken = np.zeros(n, np.int64)  # 1 + the last head for which a cluster or page was taken
        while True:
            head = count(args)
            if head >= a.heads:
                break
            head_scores = a.scores + 4 * head * turns * n
            group = head // a.heads_per_kv
            for row in range(turns):
                row_scores = head_scores + 4 * row * n
                open_scores = copies + 4 * row * blocks * BLOCK
                for j in range(n // 16 * 16, blocks * BLOCK, 16):
                    store(open_scores + 4 * j, minus)
                for j in range(0, n // 16 * 16, 16):
                    store(open_scores + 4 * j, load(row_scores + 4 * j))
                for j in range(n // 16 * 16, n):
                    store_one(open_scores + 4 * j, load_one(row_scores + 4 * j, 0))
                for i in range(blocks):
                    top = minus
                    for j in range(i * BLOCK, (i + 1) * BLOCK, 16):
                        top = maximum(load(open_scores + 4 * j), top)
                    store_one(all_tops + 4 * (row * blocks + i), max_lanes(top))
            filled, turn = 0, 0
            minus_unit = 0  # units with a score of minus infinity come last, in order
            while filled < m:
                open_scores = copies + 4 * turn * blocks * BLOCK
                tops = all_tops + 4 * turn * blocks
                turn = turn + 1 if turn + 1 < turns else 0
                best, block = np.float32(-np.inf), -1
                for i in range(blocks):
                    x = load_one(tops + 4 * i, 0)
                    if x > best:
                        best, block = x, i
                if block >= 0:
                    unit = block * BLOCK
                    while load_one(open_scores + 4 * unit, 0) != best:
                        unit += 1
                    store_one(open_scores + 4 * unit, np.float32(-np.inf))
                    top = minus
                    for j in range(block * BLOCK, (block + 1) * BLOCK, 16):
                        top = maximum(load(open_scores + 4 * j), top)
                    store_one(tops + 4 * block, max_lanes(top))
                    if turns > 1:
                        if taken[unit] == head + 1:
                            continue
                        taken[unit] = head + 1
                else:
                    while minus_unit < n and load_one(head_scores + 4 * minus_unit, 0) > lowest:
                        minus_unit += 1
                    if minus_unit >= n:
                        break
                    unit = minus_unit
                    minus_unit += 1
                target = out + 8 * (head * m + filled)
                if page:
                    many = min(page, m - filled)
                    for i in range(many):
                        store_int(target + 8 * i, unit * page + i)
                else:
                    unit_offset = 4 * (group * n + unit)
                    many = min(load_i32(size + unit_offset), m - filled)
                    members = order + 4 * (group * tokens + load_i32(start + unit_offset))
                    for i in range(many):
                        store_int(target + 8 * i, load_i32(members + 4 * i))
                filled += many
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(select, "selecting")


@cache
def bounding(d: int, dtype_code: int) -> Any:
    """Compile the bounds of pages for keys of a dtype."""
    size = SIZE[dtype_code]
    layout = BOUND.dtype

    def bound(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        hk, pages, page = a.kv_heads, a.pages, a.page
        limit, low, high = np.float32(a.largest), a.low, a.high
        nonpadding, row = a.nonpadding.address, a.x.row
        parts = -(-pages // RANGE)
        while True:
            task = count(args)
            if task >= a.heads * parts:
                break
            head, part = task // parts, task % parts
            b, h = head // hk, head % hk
            x, real_row = head_address(a.x, b, h), nonpadding + b * a.nonpadding.batch
            for p in range(part * RANGE, min(pages, (part + 1) * RANGE)):
                offset = 4 * d * (head * pages + p)
                for v in range(0, d, 16):
                    least, largest = splat(limit), splat(-limit)
                    for j in range(p * page, (p + 1) * page):
                        if nonpadding != 0 and load_byte(real_row + j) == 0:
                            continue
                        y = load_any(x + j * row + v * size, dtype_code)
                        least, largest = minimum(y, least), maximum(y, largest)
                    store(low + offset + 4 * v, least)
                    store(high + offset + 4 * v, largest)

    return Kernel(bound, f"bounding {d}, {dtype_code}")


PANEL = 2 * WIDTH  # centroids whose products are taken together
# Keys beside them: as many as leave room in the registers, 32 of sixteen lanes or fewer.
ROWS = 12 if "avx512f" in features() else 3
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
