"""Attention mass per key, compiled: tiles of logits in registers, rows normalized in place.

Decides the order of steps. `panels` lays out keys as fp32 panels first. A task of `mass` is a head
and every `splits`-th block of its query rows. Tile by tile, products of the block's rows and the
keys become exp(logit - the row's largest of this tile). Once a row's sum is final, tiles are summed
by key, each row's part times exp(largest - lse). So products and exponentials are computed once,
and only one block of rows of the attention matrix is stored. `step` does the same with the products
that a decode step's attention leaves. `lowest` finds the slot to evict. References: `column_mass`,
`step_mass` and `lowest` of `reference`; tolerance: relative 1e-4.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from ..cpu_runtime import Kernel, count, head_address, kernel_step, read_arguments, store_int
from ..simd import (
    BF16,
    FP16,
    FP32,
    LOG2_E,
    exp,
    first_lane,
    first_lanes,
    fma,
    load,
    load_one,
    masked_lanes,
    max_lanes,
    maximum,
    power_of_2,
    splat,
    store,
    store_one,
    sum_lanes,
)
from .arguments import GAUSSIAN, GUMBEL, LOWEST, MASS, PANELS, STEP_MASS, TILES
from .cpu_microkernel import (
    begin_tiles,
    end_tiles,
    find_lane,
    gaussian,
    gumbel,
    hash_u32,
    mask_not_below,
    products,
)
from .noise import A, B

TILE = 256  # keys


@kernel_step
def _widen(out, out_step, numbers, source, step, dtype_code):  # type: ignore[no-untyped-def]
    """Write numbers of a format as fp32, zeros if source is 0."""
    if source == 0:
        for i in range(numbers):
            store_one(out + i * out_step, np.float32(0.0))
    elif dtype_code == FP32:
        for i in range(numbers):
            store_one(out + i * out_step, load_one(source + i * step, FP32))
    elif dtype_code == FP16:
        for i in range(numbers):
            store_one(out + i * out_step, load_one(source + i * step, FP16))
    else:
        for i in range(numbers):
            store_one(out + i * out_step, load_one(source + i * step, BF16))


@kernel_step
def _state(options, head, row):  # type: ignore[no-untyped-def]
    """Return the hash of what noise depends on beside the key."""
    state = hash_u32((options.seed + head * A) & 0xFFFFFFFF)
    if options.fixed_noise != 0:
        return state
    return hash_u32((state + (options.first_query + row) * B) & 0xFFFFFFFF)


@kernel_step
def _exp_logits(  # type: ignore[no-untyped-def]
    s, out, lo, end, scale, softcap, inverse_tau, bias, visible, keys, noise_kind, state
):  # fmt: skip
    """Turn a row's products s into exp(logit - top); returns (top, their sum).

    s, out: fp32 [end - lo], of the keys lo to end. scale: factor of the products.
    inverse_tau: 1 / tau. bias, visible, keys: addresses of key 0's, or 0.
    """
    best = splat(np.float32(-np.inf))
    for j in range(lo, end, 16):
        x = load(s + 4 * (j - lo)) * splat(scale)
        if softcap > 0.0:  # c * tanh(x / c) = c - 2 c / (exp(2 x / c) + 1)
            cap = np.float32(softcap)
            e = exp(x * splat(np.float32(2.0) / cap))
            x = splat(cap) + splat(np.float32(-2.0) * cap) / (e + splat(np.float32(1.0)))
        if bias != 0:
            x = x + load(bias + 4 * j)
        if noise_kind == GUMBEL:
            x = x + gumbel(state, keys + 4 * j)
        elif noise_kind == GAUSSIAN:
            x = x + gaussian(state, keys + 4 * j)
        x = x * splat(inverse_tau)
        if visible != 0:
            x = masked_lanes(x, visible + j)
        if j + 16 > end:
            x = first_lanes(x, end - j)
        store(out + 4 * (j - lo), x)
        best = maximum(best, x)
    top = max_lanes(best)
    sub = splat(-top if top > np.float32(-np.inf) else np.float32(0.0))
    acc = splat(np.float32(0.0))
    for j in range(0, end - lo, 16):
        p = power_of_2((load(out + 4 * j) + sub) * splat(LOG2_E))
        store(out + 4 * j, p)
        acc = acc + p
    return top, sum_lanes(acc)


@kernel_step
def _add_up(s, stride, rows, factors, out, keys):  # type: ignore[no-untyped-def]
    """Add rows of s, fp32 [keys] and `stride` bytes apart, times their factors, to `out`."""
    for c in range(0, keys, 64):
        a0, a1 = load(out + 4 * c), load(out + 4 * c + 64)
        a2, a3 = load(out + 4 * c + 128), load(out + 4 * c + 192)
        for i in range(rows):
            f = splat(load_one(factors + 4 * i, FP32))
            row = s + i * stride + 4 * c
            a0, a1 = fma(load(row), f, a0), fma(load(row + 64), f, a1)
            a2, a3 = fma(load(row + 128), f, a2), fma(load(row + 192), f, a3)
        store(out + 4 * c, a0)
        store(out + 4 * c + 64, a1)
        store(out + 4 * c + 128, a2)
        store(out + 4 * c + 192, a3)


@kernel_step
def _take_largest(s, stride, rows, factors, out, keys):  # type: ignore[no-untyped-def]
    """Write the largest of `out` and of the rows as `_add_up` reads them."""
    for c in range(0, keys, 64):
        a0, a1 = load(out + 4 * c), load(out + 4 * c + 64)
        a2, a3 = load(out + 4 * c + 128), load(out + 4 * c + 192)
        for i in range(rows):
            f = splat(load_one(factors + 4 * i, FP32))
            row = s + i * stride + 4 * c
            a0, a1 = maximum(load(row) * f, a0), maximum(load(row + 64) * f, a1)
            a2, a3 = maximum(load(row + 128) * f, a2), maximum(load(row + 192) * f, a3)
        store(out + 4 * c, a0)
        store(out + 4 * c + 64, a1)
        store(out + 4 * c + 128, a2)
        store(out + 4 * c + 192, a3)


@kernel_step
def _exp(x):  # type: ignore[no-untyped-def]
    return first_lane(exp(splat(x)))


@kernel_step
def _options(options, b, h, head):  # type: ignore[no-untyped-def]
    """Return addresses of a head's bias, keys' flags and indices, and rows' weights; or 0."""
    bias, visible, keys, weights = 0, 0, 0, 0
    if options.bias.address != 0:
        bias = head_address(options.bias, b, head)
    if options.visible.address != 0:
        visible = head_address(options.visible, b, h)
    if options.row_weights.address != 0:
        weights = options.row_weights.address + b * options.row_weights.batch
    if options.key_index.address != 0:
        keys = head_address(options.key_index, b, h)
    return bias, visible, keys, weights


@cache
def panels(vectors: int) -> Any:
    """Compile the kernel that lays out keys as fp32 [N / panel, D, panel], 0 after the last.

    Pairs of bf16 numbers count as fp32 numbers. panel: 16 * vectors. A task is a head and a tile.
    See `score.cpu.column_mass` for the call.
    """
    panel = 16 * vectors
    layout = PANELS.dtype

    def panels(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        n, d, heads = a.tokens, a.head_dim, a.end_head - a.first_head
        tiles = -(-n // TILE)
        while True:
            task = count(args)
            if task >= a.batch * heads * tiles:
                break
            head, tile = task // tiles, task % tiles
            b, h = head // heads, a.first_head + head % heads
            base, out = head_address(a.keys, b, h), a.panels + 4 * task * TILE * d
            for j in range(TILE):
                key = base + (tile * TILE + j) * a.keys.row if tile * TILE + j < n else 0
                target = out + 4 * (j // panel * panel * d + j % panel)
                _widen(target, 4 * panel, d, key, a.keys.channel, a.dtype_code)

    return Kernel(panels, f"panels of keys {vectors}")


@cache
def mass(once: int, vectors: int, unit: int) -> Any:
    """Compile the kernel that sums attention by key; see `score.cpu.column_mass` for the call.

    once: query rows whose products with 16 * vectors keys are taken at once. unit: of `products`.
    """
    panel = 16 * vectors
    layout = MASS.dtype
    scratch_counter = 8 + layout.itemsize  # numbers the threads

    def mass(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        options, r, t, n, d = a.options, a.group, a.queries, a.tokens, a.head_dim
        heads, splits = a.end_head - a.first_head, a.splits
        scale, softcap = np.float32(a.scale), np.float32(a.softcap)
        inverse_tau, noisy = np.float32(a.inverse_tau), options.noise
        tiles, room = -(-n // TILE), once * a.blocks  # rows of a block
        row_step, step = (4 * d, 4) if unit == TILES else (4, 4 * once)  # of queries as laid out
        srow, zero16 = 4 * TILE, splat(np.float32(0.0))
        s = a.scratch + count(args + scratch_counter) * a.scratch_bytes  # [tiles, room, TILE]
        qs = s + tiles * room * srow  # queries [blocks, D, once], [blocks, once, D] for tiles
        tops = qs + 4 * room * d  # [tiles, room], a row's largest logit in a tile; its factor then
        best = tops + 4 * tiles * room  # [room], largest so far, and sum
        sums = best + 4 * room
        begin_tiles(unit)
        while True:
            task = count(args)
            if task >= a.batch * heads * r * splits:
                break
            split, head = task % splits, task // splits
            group, member = head // r, head % r
            b, h = group // heads, a.first_head + group % heads
            head = h * r + member
            keys = a.panels + 4 * group * tiles * TILE * d
            out = a.mass + 4 * ((split * a.batch + b) * a.query_heads + head) * tiles * TILE
            base = head_address(a.q, b, head)
            bias, visible, index, weights = _options(options, b, h, head)
            for row0 in range(split * room, t, splits * room):
                rows = min(room, t - row0)
                used = -(-rows // once)
                for i in range(used * once):
                    target = qs + i // once * once * 4 * d + i % once * row_step
                    query = base + (row0 + i) * a.q.row if i < rows else 0
                    _widen(target, step, d, query, a.q.channel, a.dtype_code)
                for i in range(rows):
                    other, begin_sum = np.float32(-np.inf), np.float32(0.0)
                    if a.other_lse != 0:
                        other = load_one(
                            a.other_lse + 4 * ((b * a.query_heads + head) * t + row0 + i), FP32
                        )
                        begin_sum = np.float32(1.0 if other > np.float32(-np.inf) else 0.0)
                    store_one(best + 4 * i, other)
                    store_one(sums + 4 * i, begin_sum)
                last_key, next_key = n - t + row0, 1  # of the first row; how far the next sees
                if a.other_lse != 0:
                    last_key, next_key = n - 1, 0
                reach = last_key + (rows - 1) * next_key + 1
                seen_tiles = -(-reach // TILE)
                for tile in range(seen_tiles):
                    lo = tile * TILE
                    tile_logits = s + tile * room * srow
                    for j in range(0, min(TILE, reach - lo), panel):
                        for i in range(used):
                            products(
                                qs + 4 * i * once * d, keys + 4 * (lo + j) * d,
                                tile_logits + i * once * srow + 4 * j, srow, d, once, vectors,
                                unit,
                            )  # fmt: skip
                    for i in range(rows):
                        end = min(lo + TILE, last_key + i * next_key + 1)
                        top, weight_sum, done = np.float32(-np.inf), np.float32(0.0), 0
                        if end > lo:
                            top, weight_sum = _exp_logits(
                                tile_logits + i * srow, tile_logits + i * srow, lo, end,
                                scale, softcap, inverse_tau, bias, visible, index, noisy,
                                _state(options, head, row0 + i),
                            )  # fmt: skip
                            done = (end - lo + 15) // 16 * 16
                        for j in range(done, TILE, 16):
                            store(tile_logits + i * srow + 4 * j, zero16)
                        store_one(tops + 4 * (tile * room + i), top)
                        if top > np.float32(-np.inf):
                            was, held = (
                                load_one(best + 4 * i, FP32),
                                load_one(sums + 4 * i, FP32),
                            )
                            if top > was:
                                store_one(best + 4 * i, top)
                                held = held * _exp(was - top) + weight_sum
                            else:
                                held += weight_sum * _exp(top - was)
                            store_one(sums + 4 * i, held)
                for tile in range(seen_tiles):
                    factors = tops + 4 * tile * room
                    for i in range(rows):
                        top, factor = load_one(factors + 4 * i, FP32), np.float32(0.0)
                        if top > np.float32(-np.inf):
                            factor = _exp(top - load_one(best + 4 * i, FP32))
                            factor /= load_one(sums + 4 * i, FP32)
                            if weights != 0:
                                factor *= load_one(weights + 4 * (row0 + i), FP32)
                        store_one(factors + 4 * i, factor)
                    weights_of_tile, target = s + tile * room * srow, out + tile * srow
                    if a.reduce_max != 0:
                        _take_largest(weights_of_tile, srow, rows, factors, target, TILE)
                    else:
                        _add_up(weights_of_tile, srow, rows, factors, target, TILE)
        end_tiles(unit)

    return Kernel(mass, f"column mass {once}, {vectors}{('', ', pairs', ', tiles')[unit]}")


@cache
def step() -> Any:
    """Compile the kernel that turns a step's products into mass; see `score.cpu.step_mass`.

    A task is a head.
    """
    layout = STEP_MASS.dtype
    scratch_counter = 8 + layout.itemsize  # numbers the threads

    def step(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        options, t, n, hq = a.options, a.queries, a.tokens, a.query_heads
        softcap, inverse_tau = np.float32(a.softcap), np.float32(a.inverse_tau)
        padded, zero16 = -(-n // 16) * 16, splat(np.float32(0.0))
        scratch = a.scratch + count(args + scratch_counter) * a.scratch_bytes
        while True:
            task = count(args)
            if task >= a.batch * hq:
                break
            b, head = task // hq, task % hq
            bias, visible, index, weights = _options(options, b, head // a.group, head)
            out = a.mass + 4 * task * padded
            for i in range(t):
                s = a.products + (task * t + i) * a.product_row
                end = n - t + i + 1
                row = out if i == 0 else scratch
                top, weight_sum = _exp_logits(
                    s, row, 0, end, np.float32(1.0), softcap, inverse_tau, bias, visible, index,
                    options.noise, _state(options, head, i),
                )  # fmt: skip
                factor = np.float32(0.0)
                if top > np.float32(-np.inf):
                    factor = np.float32(1.0) / weight_sum
                    if weights != 0:
                        factor *= load_one(weights + 4 * i, FP32)
                f = splat(factor)
                for j in range(0, end, 16):
                    x = load(row + 4 * j) * f
                    store(out + 4 * j, x if i == 0 else x + load(out + 4 * j))
                if i == 0:
                    for j in range((end + 15) // 16 * 16, padded, 16):
                        store(out + 4 * j, zero16)

    return Kernel(step, "step mass")


@cache
def lowest() -> Any:
    """Compile the search for the slot of the lowest score; see `score.cpu.lowest` for the call."""
    layout = LOWEST.dtype

    def lowest(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        n, end, minus = a.tokens, a.before, splat(np.float32(-1.0))
        for head in range(a.heads):
            scores, index = a.scores + 4 * head * n, a.index + 4 * head * n
            best, slot = np.float32(np.inf), 0
            for j in range(0, n, 16):
                k = max(0, min(j, n - 16))  # the last vector overlaps the one before
                x = load(scores + 4 * k)
                if a.visible != 0:
                    x = masked_lanes(x, a.visible + head * n + k)
                x = mask_not_below(x, index + 4 * k, end)
                low = -max_lanes(x * minus)
                if low < best:
                    best, slot = low, k + find_lane(x, low)
            store_int(a.slots + 8 * head, slot)

    return Kernel(lowest, "lowest score")
