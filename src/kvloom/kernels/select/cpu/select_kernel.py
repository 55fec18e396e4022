"""What clusters and pages are rated, and which are read, compiled.

Decides the order of things. Ratings are products of a head's queries with every centroid, or with
both bounds of every page, whose sum bounds q . k; work is split into (batch row, key/value head,
stretch of clusters or pages). Of a head's ratings the best are taken one after the other, from
blocks whose largest rating is known, so that nothing is sorted. The reference is `ref`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ... import cpu_runtime as team
from ... import simd as lanes
from ...attend.cpu import dequant as ways
from ...attend.cpu import microkernel as micro
from ...attend.cpu.dequant import SIZE, Way
from ...attend.cpu.microkernel import scores
from ...cpu_runtime import Kernel, count, real, sources, store_whole, whole
from ...simd import add, ahead, larger, largest, load, load_any, load_one, splat, store, store_one
from .int_ops import byte, small, smaller

STRETCH = 64  # clusters or pages that a thread takes at a time
BLOCK = 128  # ratings whose largest is known


class Form(NamedTuple):
    """What a kernel of `rating` is made for."""

    d: int
    w: int  # query rows at once
    number: int  # format of centroids or bounds
    bounds: bool  # two bounds, not one centroid


@cache
def rating(form: Form) -> Any:
    """Compile ratings of a form; see `cpu.rate` for how it is called."""
    d, w, number, bounds = form
    at_once, size, exact = 16 // w, SIZE[number], Way(kind=number).number
    emitters = sources(lanes, micro, team, ways)

    def rate(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        heads, hk, rows, n = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        q, q_low, out = whole(job, 5), whole(job, 6), whole(job, 7)
        parts = -(-n // STRETCH)
        minus = np.float32(-np.inf)
        scratch = np.zeros(16 * w + 16 * w + 16, np.float32)
        begin = (scratch.ctypes.data + 63) // 64 * 64
        more = begin + 64 * w
        orow = 4 * n
        while True:
            task = count(job)
            if task >= heads * parts:
                break
            head, part = task // parts, task % parts
            b, h = head // hk, head % hk
            high = whole(job, 8) + b * whole(job, 9) + h * whole(job, 10)
            low = whole(job, 12) + b * whole(job, 13) + h * whole(job, 14)
            hrow, lrow = whole(job, 11), whole(job, 15)
            alive = whole(job, 16) + b * whole(job, 17) + h * whole(job, 18)
            lo = part * STRETCH
            hi = min(n, lo + STRETCH)
            even = lo + (hi - lo) // at_once * at_once
            for m0 in range(0, rows, w):
                mine = 4 * (head * rows + m0) * d
                to = out + (head * rows + m0) * orow
                for j in range(lo, even, at_once):
                    if m0 == 0 and j + 2 * at_once <= n:  # rows apart look like no stream
                        for t in range(0, at_once * d * size, 64):
                            ahead(high + (j + at_once) * hrow + t)
                            if bounds:
                                ahead(low + (j + at_once) * lrow + t)
                    scores(
                        q + mine, begin, high + j * hrow, hrow, to + 4 * j, orow, 0, 0, 0, 0,
                        d, w, at_once, exact,
                    )  # fmt: skip
                    if bounds:
                        scores(
                            q_low + mine, begin, low + j * lrow, lrow, more, 64, 0, 0, 0, 0,
                            d, w, at_once, exact,
                        )  # fmt: skip
                        if w == 1:
                            store(to + 4 * j, add(load(to + 4 * j), load(more)))
                        else:
                            for i in range(w):
                                for t in range(at_once):
                                    at = to + i * orow + 4 * (j + t)
                                    y = load_one(at, 0) + load_one(more + 64 * i + 4 * t, 0)
                                    store_one(at, y)
                for j in range(even, hi):
                    scores(
                        q + mine, begin, high + j * hrow, hrow, to + 4 * j, orow, 0, 0, 0, 0,
                        d, w, 1, exact,
                    )  # fmt: skip
                    if bounds:
                        scores(
                            q_low + mine, begin, low + j * lrow, lrow, more, 64, 0, 0, 0, 0,
                            d, w, 1, exact,
                        )  # fmt: skip
                        for i in range(w):
                            at = to + i * orow + 4 * j
                            store_one(at, load_one(at, 0) + load_one(more + 64 * i, 0))
            for j in range(lo, hi):
                if bounds:
                    dead = load_one(low + j * lrow, number) > load_one(high + j * hrow, number)
                else:
                    dead = byte(alive + j) == 0
                if dead:
                    for m in range(rows):
                        store_one(out + (head * rows + m) * orow + 4 * j, minus)
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(rate, f"rating {form}")


@cache
def choosing() -> Any:
    """Compile the choice; see `cpu.choose` for how it is called."""
    emitters = sources(lanes, team)

    def choose(job):  # type: ignore[no-untyped-def]
        if emitters == 0:
            return
        heads, r, n, m = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        page, rated, out = whole(job, 5), whole(job, 6), whole(job, 7)
        size, start, order, tokens = whole(job, 8), whole(job, 9), whole(job, 10), whole(job, 11)
        minus = splat(np.float32(-np.inf))
        blocks = -(-n // BLOCK)
        scratch = np.empty(blocks * BLOCK + blocks + 16, np.float32)
        left = (scratch.ctypes.data + 63) // 64 * 64  # ratings not taken yet
        tops = left + 4 * blocks * BLOCK
        while True:
            head = count(job)
            if head >= heads:
                break
            mine = rated + 4 * head * n
            group = head // r
            for j in range(n // 16 * 16, blocks * BLOCK, 16):
                store(left + 4 * j, minus)
            for j in range(0, n // 16 * 16, 16):
                store(left + 4 * j, load(mine + 4 * j))
            for j in range(n // 16 * 16, n):
                store_one(left + 4 * j, load_one(mine + 4 * j, 0))
            for i in range(blocks):
                top = minus
                for j in range(i * BLOCK, (i + 1) * BLOCK, 16):
                    top = larger(load(left + 4 * j), top)
                store_one(tops + 4 * i, largest(top))
            filled = 0
            rest = 0  # ratings of minus infinity come last, in order
            while filled < m:
                best, at = np.float32(-np.inf), -1
                for i in range(blocks):
                    x = load_one(tops + 4 * i, 0)
                    if x > best:
                        best, at = x, i
                if at >= 0:
                    unit = at * BLOCK
                    while load_one(left + 4 * unit, 0) != best:
                        unit += 1
                    store_one(left + 4 * unit, np.float32(-np.inf))
                    top = minus
                    for j in range(at * BLOCK, (at + 1) * BLOCK, 16):
                        top = larger(load(left + 4 * j), top)
                    store_one(tops + 4 * at, largest(top))
                else:
                    while rest < n and load_one(mine + 4 * rest, 0) > np.float32(-np.inf):
                        rest += 1
                    if rest >= n:
                        break
                    unit = rest
                    rest += 1
                to = out + 8 * (head * m + filled)
                if page:
                    many = min(page, m - filled)
                    for i in range(many):
                        store_whole(to + 8 * i, unit * page + i)
                else:
                    at = 4 * (group * n + unit)
                    many = min(small(size + at), m - filled)
                    its = order + 4 * (group * tokens + small(start + at))
                    for i in range(many):
                        store_whole(to + 8 * i, small(its + 4 * i))
                filled += many
        scratch[0] = 0.0  # Numba frees an array once its last use is behind

    return Kernel(choose, "choosing")


@cache
def bounding(d: int, number: int) -> Any:
    """Compile the bounds of pages; see `cpu.page_bounds` for how it is called."""
    size = SIZE[number]
    emitters = sources(lanes, team)

    def bound(job):  # type: ignore[no-untyped-def]
        if emitters == 0:
            return
        heads, hk, pages, page = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        most, low, high = np.float32(real(job, 5)), whole(job, 6), whole(job, 7)
        parts = -(-pages // STRETCH)
        while True:
            task = count(job)
            if task >= heads * parts:
                break
            head, part = task // parts, task % parts
            b, h = head // hk, head % hk
            x = whole(job, 8) + b * whole(job, 9) + h * whole(job, 10)
            row = whole(job, 11)
            hidden = whole(job, 12) + b * whole(job, 13)
            for p in range(part * STRETCH, min(pages, (part + 1) * STRETCH)):
                to = 4 * d * (head * pages + p)
                for v in range(0, d, 16):
                    least, largest_ = splat(most), splat(-most)
                    for j in range(p * page, (p + 1) * page):
                        if whole(job, 12) != 0 and byte(hidden + j) == 0:
                            continue
                        y = load_any(x + j * row + v * size, number)
                        least, largest_ = smaller(y, least), larger(y, largest_)
                    store(low + to + 4 * v, least)
                    store(high + to + 4 * v, largest_)

    return Kernel(bound, f"bounding {d}, {number}")
