"""Attention mass per key, compiled: tiles of logits in registers, rows normalised at once.

Decides what happens in what order. Keys are laid out in panels first (`panels`). A task of `mass`
is a head and every `splits`-th block of its query rows: tile by tile, products of the block's rows
and the keys become exp(logit - the row's largest of this tile); when a row's sum is known, the
tiles are added up by key, each row's part times exp(largest - lse). So products and exponentials
are taken once, and what is held of the attention matrix is one block of rows. `step` does the same
with the products that a decode step's attention has left behind. References are `ref.column_mass`
and `ref.step_mass`; `lowest` finds the slot that is given up then.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit

from ... import cpu_runtime as team
from ... import simd as lanes
from ...cpu_runtime import Kernel, count, real, sources, whole
from ...simd import (
    BF16,
    FP16,
    FP32,
    add,
    div,
    exp,
    first,
    fma,
    lane,
    larger,
    largest,
    load,
    load_one,
    mul,
    seen,
    splat,
    store,
    store_one,
    total,
)
from .. import noise
from ..noise import A, B
from . import microkernel as micro
from .microkernel import before, behind, gaussian, gumbel, is_in, mixed, products, write_whole

TILE = 256  # keys
NONE, GUMBEL, GAUSSIAN = 0, 1, 2  # noise; one that is constant changes no softmax


@njit
def _lay(to, apart, numbers, at, step, kind, factor):  # type: ignore[no-untyped-def]
    """Write so many numbers of a format, `step` bytes apart, as fp32 times a factor; 0 if at is."""
    if at == 0:
        for i in range(numbers):
            store_one(to + i * apart, np.float32(0.0))
    elif kind == FP32:
        for i in range(numbers):
            store_one(to + i * apart, load_one(at + i * step, FP32) * factor)
    elif kind == FP16:
        for i in range(numbers):
            store_one(to + i * apart, load_one(at + i * step, FP16) * factor)
    else:
        for i in range(numbers):
            store_one(to + i * apart, load_one(at + i * step, BF16) * factor)


@njit(inline="always")
def _state(job, head, row):  # type: ignore[no-untyped-def]
    """The hash of what noise depends on beside the key."""
    state = mixed((whole(job, 38) + head * A) & 0xFFFFFFFF)
    if whole(job, 40) != 0:  # fixed
        return state
    return mixed((state + (whole(job, 39) + row) * B) & 0xFFFFFFFF)


@njit
def _soften(s, to, lo, begin, end, softcap, cool, bias, valid, keys, kind, state):  # type: ignore[no-untyped-def]
    """Turn a row's products s into exp(logit - top); returns (top, their sum).

    s, to: fp32 [end - lo], of the keys lo to end, of which the row sees those from begin. cool:
    1 / tau. bias, valid, keys: addresses of key 0's, or 0.
    """
    best = splat(np.float32(-np.inf))
    for j in range(lo, end, 16):
        x = load(s + 4 * (j - lo))
        if softcap > 0.0:  # c * tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
            cap = np.float32(softcap)
            e = exp(mul(x, splat(np.float32(2.0) / cap)))
            x = add(splat(cap), div(splat(np.float32(-2.0) * cap), add(e, splat(np.float32(1.0)))))
        if bias != 0:
            x = add(x, load(bias + 4 * j))
        if kind == GUMBEL:
            x = add(x, gumbel(state, keys + 4 * j))
        elif kind == GAUSSIAN:
            x = add(x, gaussian(state, keys + 4 * j))
        x = mul(x, splat(cool))
        if valid != 0:
            x = seen(x, valid + j)
        if j < begin:
            x = behind(x, begin - j)
        if j + 16 > end:
            x = first(x, end - j)
        store(to + 4 * (j - lo), x)
        best = larger(best, x)
    top = largest(best)
    sub = splat(-top if top > np.float32(-np.inf) else np.float32(0.0))
    acc = splat(np.float32(0.0))
    for j in range(0, end - lo, 16):
        p = exp(add(load(to + 4 * j), sub))
        store(to + 4 * j, p)
        acc = add(acc, p)
    return top, total(acc)


@njit
def _add_up(s, stride, rows, factors, to, keys):  # type: ignore[no-untyped-def]
    """Add rows of s, fp32 [keys] and `stride` bytes apart, times their factors, to `to`."""
    for c in range(0, keys, 64):
        a0, a1 = load(to + 4 * c), load(to + 4 * c + 64)
        a2, a3 = load(to + 4 * c + 128), load(to + 4 * c + 192)
        for i in range(rows):
            f = splat(load_one(factors + 4 * i, FP32))
            at = s + i * stride + 4 * c
            a0, a1 = fma(load(at), f, a0), fma(load(at + 64), f, a1)
            a2, a3 = fma(load(at + 128), f, a2), fma(load(at + 192), f, a3)
        store(to + 4 * c, a0)
        store(to + 4 * c + 64, a1)
        store(to + 4 * c + 128, a2)
        store(to + 4 * c + 192, a3)


@njit(inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    return lane(exp(splat(x)))


@njit(inline="always")
def _options(job, b, h, head):  # type: ignore[no-untyped-def]
    """Addresses of a head's bias, its keys' flags and indices, and its rows' weights; or 0."""
    bias, valid, keys, weights = 0, 0, 0, 0
    if whole(job, 26) != 0:
        bias = whole(job, 26) + b * whole(job, 27) + head * whole(job, 28)
    if whole(job, 29) != 0:
        valid = whole(job, 29) + b * whole(job, 30) + h * whole(job, 31)
    if whole(job, 32) != 0:
        weights = whole(job, 32) + b * whole(job, 33)
    if whole(job, 34) != 0:
        keys = whole(job, 34) + b * whole(job, 35) + h * whole(job, 36)
    return bias, valid, keys, weights


@cache
def panels(vectors: int) -> Any:
    """Compile what lays keys out as fp32 [N / panel, D, panel], 0 behind the last.

    panel: 16 * vectors. A task is a head and a tile. See `cpu.column_mass` for how it is called.
    """
    panel = 16 * vectors
    emitters = sources(lanes, micro, noise, team)

    def panels(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        batch, n, d, h0, h1 = (
            whole(job, 1),
            whole(job, 4),
            whole(job, 5),
            whole(job, 6),
            whole(job, 7),
        )
        key, channel, kind = whole(job, 19), whole(job, 20), whole(job, 21)
        tiles = -(-n // TILE)
        while True:
            task = count(job)
            if task >= batch * (h1 - h0) * tiles:
                break
            head, tile = task // tiles, task % tiles
            b, h = head // (h1 - h0), h0 + head % (h1 - h0)
            base = whole(job, 16) + b * whole(job, 17) + h * whole(job, 18)
            to = whole(job, 22) + 4 * task * TILE * d
            for j in range(TILE):
                at = base + (tile * TILE + j) * key if tile * TILE + j < n else 0
                there = to + 4 * (j // panel * panel * d + j % panel)
                _lay(there, 4 * panel, d, at, channel, kind, np.float32(1.0))

    return Kernel(panels, "panels of keys")


@cache
def mass(once: int, vectors: int) -> Any:
    """Compile what adds attention up by key; see `cpu.column_mass` for how it is called.

    once: query rows whose products with 16 * vectors keys are taken at once.
    """
    panel = 16 * vectors
    emitters = sources(lanes, micro, noise, team)

    def mass(job):  # type: ignore[no-untyped-def]
        if emitters == 0:
            return
        batch, r, t, n, d = (
            whole(job, 1),
            whole(job, 2),
            whole(job, 3),
            whole(job, 4),
            whole(job, 5),
        )
        h0, h1, splits, blocks = whole(job, 6), whole(job, 7), whole(job, 8), whole(job, 9)
        scale, softcap = np.float32(real(job, 41)), np.float32(real(job, 42))
        cool, window, noisy = np.float32(real(job, 43)), whole(job, 44), whole(job, 37)
        row, channel, kind = whole(job, 14), whole(job, 15), whole(job, 21)
        tiles, room = -(-n // TILE), once * blocks  # rows of a block
        srow, zero16 = 4 * TILE, splat(np.float32(0.0))
        s = whole(job, 24) + count(job + 8 * 45) * whole(job, 25)  # [tiles, room, TILE]
        qs = s + tiles * room * srow  # queries times scale [blocks, D, once]
        tops = qs + 4 * room * d  # [tiles, room], a row's largest logit in a tile; its factor then
        best = tops + 4 * tiles * room  # [room], largest so far, and sum
        sums = best + 4 * room
        while True:
            task = count(job)
            if task >= batch * (h1 - h0) * r * splits:
                break
            split, head = task % splits, task // splits
            group, member = head // r, head % r
            b, h = group // (h1 - h0), h0 + group % (h1 - h0)
            head = h * r + member
            keys = whole(job, 22) + 4 * group * tiles * TILE * d
            to = whole(job, 23) + 4 * ((split * batch + b) * whole(job, 10) + head) * tiles * TILE
            base = whole(job, 11) + b * whole(job, 12) + head * whole(job, 13)
            bias, valid, index, weights = _options(job, b, h, head)
            for row0 in range(split * room, t, splits * room):
                rows = min(room, t - row0)
                used = -(-rows // once)
                for i in range(used * once):
                    there = qs + 4 * (i // once * once * d + i % once)
                    at = base + (row0 + i) * row if i < rows else 0
                    _lay(there, 4 * once, d, at, channel, kind, scale)
                for i in range(rows):
                    store_one(best + 4 * i, np.float32(-np.inf))
                    store_one(sums + 4 * i, np.float32(0.0))
                own = n - t + row0  # the first row's key
                tile0 = max(0, own - window + 1) // TILE if window > 0 else 0
                tile1 = -(-(own + rows) // TILE)
                for tile in range(tile0, tile1):
                    lo = tile * TILE
                    its = s + tile * room * srow
                    for j in range(0, min(TILE, own + rows - lo), panel):
                        for i in range(used):
                            products(
                                qs + 4 * i * once * d, keys + 4 * (lo + j) * d,
                                its + i * once * srow + 4 * j, srow, d, once, vectors,
                            )  # fmt: skip
                    for i in range(rows):
                        end = min(lo + TILE, own + i + 1)
                        begin = max(lo, own + i - window + 1) if window > 0 else lo
                        top, more, done = np.float32(-np.inf), np.float32(0.0), 0
                        if end > begin:
                            top, more = _soften(
                                its + i * srow, its + i * srow, lo, begin, end, softcap, cool,
                                bias, valid, index, noisy, _state(job, head, row0 + i),
                            )  # fmt: skip
                            done = (end - lo + 15) // 16 * 16
                        for j in range(done, TILE, 16):
                            store(its + i * srow + 4 * j, zero16)
                        store_one(tops + 4 * (tile * room + i), top)
                        if top > np.float32(-np.inf):
                            was, held = (
                                load_one(best + 4 * i, FP32),
                                load_one(sums + 4 * i, FP32),
                            )
                            if top > was:
                                store_one(best + 4 * i, top)
                                held = held * _exp(was - top) + more
                            else:
                                held += more * _exp(top - was)
                            store_one(sums + 4 * i, held)
                for tile in range(tile0, tile1):
                    factors = tops + 4 * tile * room
                    for i in range(rows):
                        top, factor = load_one(factors + 4 * i, FP32), np.float32(0.0)
                        if top > np.float32(-np.inf):
                            factor = _exp(top - load_one(best + 4 * i, FP32))
                            factor /= load_one(sums + 4 * i, FP32)
                            if weights != 0:
                                factor *= load_one(weights + 4 * (row0 + i), FP32)
                        store_one(factors + 4 * i, factor)
                    _add_up(s + tile * room * srow, srow, rows, factors, to + tile * srow, TILE)

    return Kernel(mass, "column mass")


@cache
def step() -> Any:
    """Compile what makes mass of a step's products; see `cpu.step_mass` for how it is called.

    A task is a head.
    """
    emitters = sources(lanes, micro, noise, team)

    def step(job):  # type: ignore[no-untyped-def]
        if emitters == 0:
            return
        batch, r, t, n, hq = (
            whole(job, 1),
            whole(job, 2),
            whole(job, 3),
            whole(job, 4),
            whole(job, 10),
        )
        softcap, cool, noisy = np.float32(real(job, 42)), np.float32(real(job, 43)), whole(job, 37)
        padded, zero16 = -(-n // 16) * 16, splat(np.float32(0.0))
        scratch = whole(job, 24) + count(job + 8 * 45) * whole(job, 25)
        while True:
            task = count(job)
            if task >= batch * hq:
                break
            b, head = task // hq, task % hq
            bias, valid, index, weights = _options(job, b, head // r, head)
            to = whole(job, 23) + 4 * task * padded
            for i in range(t):
                s = whole(job, 22) + (task * t + i) * whole(job, 21)
                end = n - t + i + 1
                row = to if i == 0 else scratch
                top, more = _soften(
                    s, row, 0, 0, end, softcap, cool, bias, valid, index, noisy,
                    _state(job, head, i),
                )  # fmt: skip
                factor = np.float32(0.0)
                if top > np.float32(-np.inf):
                    factor = np.float32(1.0) / more
                    if weights != 0:
                        factor *= load_one(weights + 4 * i, FP32)
                f = splat(factor)
                for j in range(0, end, 16):
                    x = mul(load(row + 4 * j), f)
                    store(to + 4 * j, x if i == 0 else add(x, load(to + 4 * j)))
                if i == 0:
                    for j in range((end + 15) // 16 * 16, padded, 16):
                        store(to + 4 * j, zero16)

    return Kernel(step, "step mass")


@cache
def lowest() -> Any:
    """Compile what finds the slot of the lowest score; see `cpu.lowest` for how it is called."""
    emitters = sources(lanes, micro, team)

    def lowest(job):  # type: ignore[no-untyped-def]
        if emitters == 0:
            return
        n, end, see, minus = whole(job, 2), whole(job, 3), whole(job, 6), splat(np.float32(-1.0))
        for head in range(whole(job, 1)):
            scores, index = whole(job, 4) + 4 * head * n, whole(job, 5) + 4 * head * n
            best, at = np.float32(np.inf), 0
            for j in range(0, n, 16):
                # what is behind the last score: the whole vector, shifted
                k = max(0, min(j, n - 16))
                x = load(scores + 4 * k)
                if see != 0:
                    x = seen(x, see + head * n + k)
                x = before(x, index + 4 * k, end)
                low = -largest(mul(x, minus))
                if low < best:
                    best, at = low, k + is_in(x, low)
            write_whole(whole(job, 7) + 8 * head, at)

    return Kernel(lowest, "lowest score")
