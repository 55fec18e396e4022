"""Attention of many queries to exact bf16 keys and values, compiled.

Decides the order of steps. A task is a query head and a block of query rows. Tile by tile of keys,
products of the rows and the keys become weights exp(logit - the row's largest so far), rounded to
bf16, whose products with the tile's values are added to what the former tiles left. Pairs of bf16
numbers are multiplied in one instruction. The last rows, which see the most keys, come first.
Reference: `reference.attend_exact`; tolerance: that of bf16 weights.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...cpu_runtime import Kernel, count, head_address, kernel_step, read_arguments
from ...score.arguments import TILES
from ...score.cpu_microkernel import (
    TILES_AT_ONCE,
    add_tile_products,
    begin_tiles,
    end_tiles,
    products,
)
from ...simd import (
    F32,
    FP32,
    I64,
    LN_2,
    LOG2_E,
    VF,
    WIDTH,
    Lanes,
    add_bytes,
    broadcast,
    constant,
    first_lane,
    first_lanes,
    fma,
    load,
    load_one,
    loop,
    lowered,
    masked_lanes,
    max_lanes,
    maximum,
    muladd_pairs,
    power_of_2,
    read,
    splat,
    store,
    store_one,
    sum_lanes,
    write,
)
from .arguments import PROMPT

PANEL = 32  # keys or channels, whose products with some rows fill the registers


class TaskSizes(NamedTuple):
    """What a task works on at once.

    rows: query rows, whose products with a panel are taken at once. blocks: of such rows. tile:
    keys.
    """

    rows: int
    blocks: int
    tile: int


def sizes(unit: int) -> TaskSizes:
    """Return the sizes for a unit of `products`, as measured."""
    return TaskSizes(TILES_AT_ONCE[0], 2, 512) if unit == TILES else TaskSizes(12, 4, 128)


@intrinsic
def _store_bf16(ctx: Any, address: Any, x: Any) -> Any:
    """Store sixteen numbers as bf16."""
    half = ir.VectorType(ir.IntType(16), WIDTH)

    def emit(b: Any, address: Any, x: Any) -> None:
        asm = ir.InlineAsm(ir.FunctionType(half, [VF]), "vcvtneps2bf16 $1, $0", "=v,v")
        b.store(b.call(asm, [x]), b.inttoptr(address, half.as_pointer()), align=2)

    return lowered(types.void(types.int64, Lanes), emit)


@intrinsic(prefer_literal=True)
def _add_values(
    ctx: Any, weights: Any, values: Any, out: Any, step: Any, pairs: Any, unit: Any
) -> Any:
    """Add to some rows of out the weighted sums of a panel of values.

    weights: pairs of bf16 [rows, tile / 2]. values: pairs [pairs, PANEL]. out: fp32 rows of PANEL
    numbers, `step` bytes apart. unit, a constant, decides the `sizes`.
    """
    rows, _, tile = sizes(unit.literal_value)

    def emit_tiles(
        b: Any, weights: Any, values: Any, out: Any, step: Any, pairs: Any, _: Any
    ) -> None:
        add_tile_products(b, weights, ir.Constant(I64, 2 * tile), values, out, step, pairs)

    def emit(b: Any, weights: Any, values: Any, out: Any, step: Any, pairs: Any, _: Any) -> None:
        def add(i: Any, sums: list[Any]) -> list[Any]:
            source = b.add(values, b.mul(i, ir.Constant(I64, 4 * PANEL)))
            panel = [read(b, add_bytes(b, source, 64 * v), VF) for v in range(2)]
            source, totals = b.add(weights, b.mul(i, ir.Constant(I64, 4))), []
            for row in range(rows):
                weight = broadcast(b, read(b, add_bytes(b, source, 2 * tile * row), F32))
                totals += [
                    muladd_pairs(b, weight, value, sums[2 * row + v])
                    for v, value in enumerate(panel)
                ]
            return totals

        sums = loop(b, pairs, [constant(0.0)] * (2 * rows), add)
        for row in range(rows):
            out_row = b.add(out, b.mul(step, ir.Constant(I64, row)))
            for v in range(2):
                target = add_bytes(b, out_row, 64 * v)
                write(b, target, b.fadd(read(b, target, VF), sums[2 * row + v]))

    in_tiles = unit.literal_value == TILES
    return lowered(types.void(*[types.int64] * 5, unit), emit_tiles if in_tiles else emit)


@kernel_step
def _softmax_row(s, out, count, room, scale, visible, best):  # type: ignore[no-untyped-def]
    """Turn a row's products s into weights in bf16; returns (largest logit so far, their sum).

    Logits are base 2: s * scale. s: fp32 [count]. out: bf16 [room], 0 behind count. visible:
    address of the first key's, or 0. best: the largest logit of former tiles.
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
        p = power_of_2(fma(load(s + 4 * j), factor, sub))
        _store_bf16(out + 2 * j, p)
        acc = acc + p
    for j in range((count + 15) // 16 * 16, room, 16):
        _store_bf16(out + 2 * j, zero)
    return top, sum_lanes(acc)


@kernel_step
def _ratio(x):  # type: ignore[no-untyped-def]
    return first_lane(power_of_2(splat(x)))


@cache
def prompt(unit: int) -> Any:
    """Compile the kernel; see `prompt.attend` for the call. unit: of `products`."""
    layout, (once, in_task, tile_keys) = PROMPT.dtype, sizes(unit)
    most_rows = once * in_task
    scratch_counter = 8 + layout.itemsize  # numbers the threads

    def prompt(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        t, n, d, r, hk = a.queries, a.tokens, a.head_dim, a.group, a.kv_heads
        scale, words, hq = np.float32(a.scale) * LOG2_E, d // 2, r * hk
        tiles, blocks = -(-n // tile_keys), -(-t // most_rows)
        thread = count(args + scratch_counter)
        s = a.scratch + thread * a.scratch_bytes  # fp32 [most_rows, tile_keys]
        p = s + 4 * most_rows * tile_keys  # bf16 [most_rows, tile_keys]
        sums_out = p + 2 * most_rows * tile_keys  # fp32 [most_rows, D]
        best = sums_out + 4 * most_rows * d  # fp32 [most_rows]: largest logit, sum
        sums = best + 4 * most_rows
        zero16 = splat(np.float32(0.0))
        begin_tiles(unit)
        while True:
            task = count(args)
            if task >= a.batch * hq * blocks:
                break
            head, block = task % (a.batch * hq), blocks - 1 - task // (a.batch * hq)
            b, member = head // hq, head % hq
            h = member // r
            group, row0 = b * hk + h, block * most_rows
            rows = min(most_rows, t - row0)
            used = -(-rows // once)
            q = a.q + 4 * (head * blocks + block) * words * most_rows
            keys = a.keys + 4 * group * tiles * tile_keys * words
            values = a.values + 4 * group * tiles * (tile_keys // 2) * d
            seen = 0
            if a.visible.address != 0:
                seen = head_address(a.visible, b, h)
            for i in range(most_rows):
                store_one(best + 4 * i, np.float32(-np.inf))
                store_one(sums + 4 * i, np.float32(0.0))
            for i in range(0, most_rows * d, 16):
                store(sums_out + 4 * i, zero16)
            last_key, end = n, n  # the first row's key; after the last that a row sees
            if a.causal:
                last_key = n - t + row0
                end = last_key + rows
            for tile in range(-(-end // tile_keys)):
                lo = tile * tile_keys
                width = min(tile_keys, end - lo)
                for j in range(0, width, PANEL):
                    for i in range(used):
                        products(
                            q + 4 * i * words * once, keys + 4 * (lo + j) * words,
                            s + 4 * (i * once * tile_keys + j), 4 * tile_keys, words, once, 2, unit,
                        )  # fmt: skip
                room = (width + 31) // 32 * 32
                for i in range(used * once):
                    visible_keys = 0 if i >= rows else max(0, min(width, last_key + i + 1 - lo))
                    was = load_one(best + 4 * i, FP32)
                    top, weight_sum = _softmax_row(
                        s + 4 * i * tile_keys, p + 2 * i * tile_keys, visible_keys, room, scale,
                        0 if seen == 0 else seen + lo, was,
                    )  # fmt: skip
                    if top > was and was > np.float32(-np.inf):
                        factor = _ratio(was - top)
                        weight_sum += load_one(sums + 4 * i, FP32) * factor
                        for c in range(4 * i * d, 4 * (i + 1) * d, 64):
                            store(sums_out + c, load(sums_out + c) * splat(factor))
                    else:
                        weight_sum += load_one(sums + 4 * i, FP32)
                    store_one(best + 4 * i, top)
                    store_one(sums + 4 * i, weight_sum)
                for c in range(0, d, PANEL):
                    panel = values + 4 * (lo // 2 * d + c * (tile_keys // 2))
                    for i in range(0, used * once, once):
                        _add_values(
                            p + 2 * i * tile_keys, panel, sums_out + 4 * (i * d + c), 4 * d,
                            room // 2, unit,
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
                store_one(a.lse + 4 * row, load_one(best + 4 * i, FP32) * LN_2 + np.log(total))

        end_tiles(unit)

    return Kernel(prompt, f"prompt attention{('', ', tiles')[unit == TILES]}")
