"""Attention of many queries to exact bf16 keys and values, compiled.

Decides the order of steps. A task is a query head and a block of query rows. Tile by tile of keys,
products of the rows and the keys become weights exp(logit - the row's largest so far), rounded to
bf16, whose products with the tile's values are added to what the former tiles left. Pairs of bf16
numbers are multiplied in one instruction. The last rows, which see the most keys, come first.
Reference: `reference.attend_exact`; tolerance: that of bf16 weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...cpu_runtime import Kernel, count, head_address, kernel_step, read_arguments
from ...score.arguments import PAIRS
from ...score.cpu_microkernel import products
from ...simd import (
    F32,
    FP32,
    I64,
    VF,
    WIDTH,
    Lanes,
    add_bytes,
    broadcast,
    constant,
    exp,
    first_lane,
    first_lanes,
    load,
    load_one,
    loop,
    lowered,
    masked_lanes,
    max_lanes,
    maximum,
    muladd,
    muladd_pairs,
    read,
    splat,
    store,
    store_one,
    sum_lanes,
    write,
)
from .arguments import PROMPT

ROWS, PANEL = 12, 32  # query rows, and keys or channels, whose products fill the registers
TILE = 128  # keys
BLOCKS = 4  # of `ROWS` rows, which a task works on at once
_ROOM = ROWS * BLOCKS


@intrinsic
def _store_bf16(ctx: Any, address: Any, x: Any) -> Any:
    """Store sixteen numbers as bf16."""
    half = ir.VectorType(ir.IntType(16), WIDTH)

    def emit(b: Any, address: Any, x: Any) -> None:
        asm = ir.InlineAsm(ir.FunctionType(half, [VF]), "vcvtneps2bf16 $1, $0", "=v,v")
        b.store(b.call(asm, [x]), b.inttoptr(address, half.as_pointer()), align=2)

    return lowered(types.void(types.int64, Lanes), emit)


@intrinsic
def _add_values(
    ctx: Any, weights: Any, values: Any, out: Any, step: Any, factors: Any, pairs: Any
) -> Any:
    """Multiply `ROWS` rows of out by their factors, and add the weighted sum of a panel of values.

    weights: pairs of bf16 [ROWS, TILE / 2]. values: pairs [pairs, PANEL]. out: fp32 rows of PANEL
    numbers, `step` bytes apart. factors: fp32 [ROWS].
    """

    def emit(
        b: Any, weights: Any, values: Any, out: Any, step: Any, factors: Any, pairs: Any
    ) -> None:
        def add(i: Any, sums: list[Any]) -> list[Any]:
            source = b.add(values, b.mul(i, ir.Constant(I64, 4 * PANEL)))
            panel = [read(b, add_bytes(b, source, 64 * v), VF) for v in range(2)]
            source, totals = b.add(weights, b.mul(i, ir.Constant(I64, 4))), []
            for row in range(ROWS):
                weight = broadcast(b, read(b, add_bytes(b, source, 2 * TILE * row), F32))
                totals += [
                    muladd_pairs(b, weight, value, sums[2 * row + v])
                    for v, value in enumerate(panel)
                ]
            return totals

        sums = loop(b, pairs, [constant(0.0)] * (2 * ROWS), add)
        for row in range(ROWS):
            factor = broadcast(b, read(b, add_bytes(b, factors, 4 * row), F32))
            out_row = b.add(out, b.mul(step, ir.Constant(I64, row)))
            for v in range(2):
                target = add_bytes(b, out_row, 64 * v)
                write(b, target, muladd(b, read(b, target, VF), factor, sums[2 * row + v]))

    return lowered(types.void(*[types.int64] * 6), emit)


@kernel_step
def _softmax_row(s, out, count, room, scale, visible, best):  # type: ignore[no-untyped-def]
    """Turn a row's products s into weights in bf16; returns (largest logit so far, their sum).

    s: fp32 [count]. out: bf16 [room], 0 behind count. visible: address of the first key's, or 0.
    best: the largest logit of former tiles.
    """
    most = splat(np.float32(-np.inf))
    if visible == 0 and count % 16 == 0:
        for j in range(0, count, 16):
            most = maximum(most, load(s + 4 * j))
    else:
        for j in range(0, count, 16):
            x = load(s + 4 * j)
            if visible != 0:
                x = masked_lanes(x, visible + j)
            if j + 16 > count:
                x = first_lanes(x, count - j)
            store(s + 4 * j, x)
            most = maximum(most, x)
    top = max(best, max_lanes(most) * scale)
    sub = splat(-top if top > np.float32(-np.inf) else np.float32(0.0))
    acc, zero, factor = splat(np.float32(0.0)), splat(np.float32(0.0)), splat(scale)
    for j in range(0, count, 16):
        p = exp(load(s + 4 * j) * factor + sub)
        _store_bf16(out + 2 * j, p)
        acc = acc + p
    for j in range((count + 15) // 16 * 16, room, 16):
        _store_bf16(out + 2 * j, zero)
    return top, sum_lanes(acc)


@kernel_step
def _exp(x):  # type: ignore[no-untyped-def]
    return first_lane(exp(splat(x)))


@cache
def prompt() -> Any:
    """Compile the kernel; see `prompt.attend` for the call."""
    layout = PROMPT.dtype
    scratch_counter = 8 + layout.itemsize  # numbers the threads

    def prompt(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        t, n, d, r, hk = a.queries, a.tokens, a.head_dim, a.group, a.kv_heads
        scale, words, hq = np.float32(a.scale), d // 2, r * hk
        tiles, blocks = -(-n // TILE), -(-t // _ROOM)
        s = a.scratch + count(args + scratch_counter) * a.scratch_bytes  # fp32 [_ROOM, TILE]
        p = s + 4 * _ROOM * TILE  # bf16 [_ROOM, TILE]
        sums_out = p + 2 * _ROOM * TILE  # fp32 [_ROOM, D]
        best = sums_out + 4 * _ROOM * d  # fp32 [_ROOM]: largest logit, sum, factor
        sums, factors = best + 4 * _ROOM, best + 8 * _ROOM
        zero16 = splat(np.float32(0.0))
        while True:
            task = count(args)
            if task >= a.batch * hq * blocks:
                break
            head, block = task % (a.batch * hq), blocks - 1 - task // (a.batch * hq)
            b, member = head // hq, head % hq
            h = member // r
            group, row0 = b * hk + h, block * _ROOM
            rows = min(_ROOM, t - row0)
            used = -(-rows // ROWS)
            q = a.q + 4 * (head * blocks * BLOCKS + block * BLOCKS) * words * ROWS
            keys = a.keys + 4 * group * tiles * TILE * words
            values = a.values + 4 * group * tiles * (TILE // 2) * d
            seen = 0
            if a.visible.address != 0:
                seen = head_address(a.visible, b, h)
            for i in range(_ROOM):
                store_one(best + 4 * i, np.float32(-np.inf))
                store_one(sums + 4 * i, np.float32(0.0))
            for i in range(0, _ROOM * d, 16):
                store(sums_out + 4 * i, zero16)
            last_key, end = n, n  # the first row's key; after the last that a row sees
            if a.causal:
                last_key = n - t + row0
                end = last_key + rows
            for tile in range(-(-end // TILE)):
                lo = tile * TILE
                width = min(TILE, end - lo)
                for j in range(0, width, PANEL):
                    for i in range(used):
                        products(
                            q + 4 * i * words * ROWS, keys + 4 * (lo + j) * words,
                            s + 4 * (i * ROWS * TILE + j), 4 * TILE, words, ROWS, 2, PAIRS,
                        )  # fmt: skip
                room = (width + 31) // 32 * 32
                for i in range(used * ROWS):
                    visible_keys = 0 if i >= rows else max(0, min(width, last_key + i + 1 - lo))
                    was = load_one(best + 4 * i, FP32)
                    top, weight_sum = _softmax_row(
                        s + 4 * i * TILE, p + 2 * i * TILE, visible_keys, room, scale,
                        0 if seen == 0 else seen + lo, was,
                    )  # fmt: skip
                    factor = np.float32(0.0)
                    if was > np.float32(-np.inf):
                        factor = np.float32(1.0) if top == was else _exp(was - top)
                    store_one(best + 4 * i, top)
                    store_one(factors + 4 * i, factor)
                    store_one(sums + 4 * i, load_one(sums + 4 * i, FP32) * factor + weight_sum)
                for c in range(0, d, PANEL):
                    panel = values + 4 * (lo // 2 * d + c * (TILE // 2))
                    for i in range(0, used * ROWS, ROWS):
                        _add_values(
                            p + 2 * i * TILE, panel, sums_out + 4 * (i * d + c), 4 * d,
                            factors + 4 * i, room // 2,
                        )  # fmt: skip
            for i in range(rows):
                total = load_one(sums + 4 * i, FP32)
                share = np.float32(0.0)
                if total > np.float32(0.0):
                    share = np.float32(1.0) / total
                factor16, row = splat(share), head * t + row0 + i
                for c in range(0, d, 16):
                    x = load(sums_out + 4 * (i * d + c)) * factor16
                    _store_bf16(a.out + 2 * (row * d + c), x)
                store_one(a.lse + 4 * row, load_one(best + 4 * i, FP32) + np.log(total))

    return Kernel(prompt, "prompt attention")
