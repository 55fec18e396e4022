"""Steps for rotated groups: rotate a row of channels, round it to levels, and back.

The arithmetic is that of `quantize.hadamard` to the last bit: the same sums in the same order. Rows
of numbers are fp32, padded to whole vectors; codes are one byte each. Addresses are int64.
Importing this imports Numba.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ....encoding import PACK_BLOCK, top
from ...cpu_runtime import kernel_step
from ...simd import (
    F32,
    I32,
    I64,
    VF,
    VI,
    WIDTH,
    Lanes,
    add_bytes,
    broadcast,
    call,
    constant,
    gather_f32,
    load,
    load_one,
    lowered,
    maximum,
    minimum,
    muladd,
    read,
    splat,
    store,
    store_one,
    write,
)
from .codes import clamp_scale, nonzero, put_vector
from .tiles import narrow

_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
_MAX_LINEAR = 15  # the highest code of formats whose levels are compared one by one


def _forms(b: Any, bits_x2: Any) -> Any:
    """Yield the highest code of every number of bits, within code that runs for those bits only."""
    for bits in PACK_BLOCK:
        with b.if_then(b.icmp_signed("==", bits_x2, ir.Constant(I64, int(2 * bits)))):
            yield top(bits)


def _all(b: Any, table: Any, i: int) -> Any:
    """Return number i of a table, in all lanes."""
    return broadcast(b, read(b, add_bytes(b, table, 4 * i), F32))


def _compared(
    b: Any, x: Any, ends: Any, levels: Any, highest: int, every: int = 1
) -> tuple[Any, Any]:
    """Quantize sixteen values by comparing them with the boundaries, or with every n-th."""
    code, level = constant(0, VI), _all(b, levels, 0)
    for i in range(highest // every):
        above = b.fcmp_ordered(">", x, _all(b, ends, every * (i + 1) - 1))
        code = b.sub(code, b.sext(above, VI))
        level = b.select(above, _all(b, levels, i + 1), level)
    return code, level


def _searched(b: Any, x: Any, ends: Any, levels: Any, highest: int) -> tuple[Any, Any]:
    """Quantize sixteen values to 256 levels: every 16th boundary, then binary search."""
    code = b.mul(_compared(b, x, ends, levels, highest, 16)[0], constant(16, VI))
    for step in (8, 4, 2, 1):
        above = b.fcmp_ordered(">", x, gather_f32(b, add_bytes(b, ends, 4 * (step - 1)), code))
        code = b.select(above, b.add(code, constant(step, VI)), code)
    return code, gather_f32(b, levels, code)


def _named(b: Any, code: Any, levels: Any, highest: int) -> Any:
    """Return the levels of sixteen codes."""
    if highest > _MAX_LINEAR:
        return gather_f32(b, levels, code)
    level = _all(b, levels, 0)
    for i in range(highest):
        above = b.icmp_signed(">", code, constant(i, VI))
        level = b.select(above, _all(b, levels, i + 1), level)
    return level


@intrinsic(prefer_literal=True)
def butterfly(ctx: Any, x: Any, half: Any) -> Any:
    """Return a + b in lanes of a, a - b in those of b: a, b are `half` lanes apart, in turns."""
    distance = half.literal_value
    others = ir.Constant(VI, [i ^ distance for i in range(WIDTH)])
    signs = ir.Constant(VF, [-1.0 if i & distance else 1.0 for i in range(WIDTH)])

    def emit(b: Any, x: Any, _: Any) -> Any:
        other = b.shuffle_vector(x, ir.Constant(VF, ir.Undefined), others)
        return muladd(b, x, signs, other)

    return lowered(Lanes(Lanes, half), emit)


@intrinsic
def halved(ctx: Any, x: Any) -> Any:
    """Return the sum of all lanes: the upper half is added to the lower until one is left."""

    def emit(b: Any, x: Any) -> Any:
        while x.type.count > 1:
            half = x.type.count // 2
            kind, undefined = ir.VectorType(I32, half), ir.Constant(x.type, ir.Undefined)
            low, high = (
                b.shuffle_vector(x, undefined, ir.Constant(kind, list(range(i, i + half))))
                for i in (0, half)
            )
            x = b.fadd(low, high)
        return b.extract_element(x, ir.Constant(I32, 0))

    return lowered(types.float32(Lanes), emit)


@intrinsic
def root(ctx: Any, x: Any) -> Any:
    """Return the square root."""
    return lowered(Lanes(Lanes), lambda b, x: call(b, "llvm.sqrt.v16f32", VF, x))


@intrinsic
def nearest(ctx: Any, x: Any, ends: Any, levels: Any, bits_x2: Any, codes: Any, out: Any) -> Any:
    """Store the codes and the levels of sixteen numbers.

    ends: fp32, up to where each level but the last is the nearest; levels: fp32. bits_x2: twice the
    bits of a code.
    """

    def emit(b: Any, x: Any, ends: Any, levels: Any, bits_x2: Any, codes: Any, out: Any) -> None:
        for highest in _forms(b, bits_x2):
            way = _searched if highest > _MAX_LINEAR else _compared
            code, level = way(b, x, ends, levels, highest)
            put_vector(b, codes, b.trunc(code, _BYTES))
            write(b, out, level)

    return lowered(types.void(Lanes, *[types.int64] * 5), emit)


@intrinsic
def leveled(ctx: Any, codes: Any, levels: Any, bits_x2: Any, scale: Any, out: Any) -> Any:
    """Store the levels of sixteen codes, times a scale."""

    def emit(b: Any, codes: Any, levels: Any, bits_x2: Any, scale: Any, out: Any) -> None:
        code = b.zext(read(b, codes, _BYTES, 1), VI)
        for highest in _forms(b, bits_x2):
            write(b, out, b.fmul(_named(b, code, levels, highest), scale))

    return lowered(types.void(types.int64, types.int64, types.int64, Lanes, types.int64), emit)


@kernel_step
def hadamard(x, n, size, before, after):  # type: ignore[no-untyped-def]
    """Multiply blocks of `size` numbers, a power of 2, by the Hadamard matrix, in place.

    before, after: fp32, by which numbers are multiplied, whole vectors, or 0.
    """
    for c in range(0, n, 16):
        values = load(x + 4 * c)
        if before != 0:
            values = values * load(before + 4 * c)
        if size > 1:
            values = butterfly(values, 1)
        if size > 2:
            values = butterfly(values, 2)
        if size > 4:
            values = butterfly(values, 4)
        if size > 8:
            values = butterfly(values, 8)
        store(x + 4 * c, values)
    half = 16
    while half < size:
        for block in range(0, n, 2 * half):
            for c in range(block, block + half, 16):
                a, b = load(x + 4 * c), load(x + 4 * (c + half))
                store(x + 4 * c, a + b)
                store(x + 4 * (c + half), a - b)
        half *= 2
    shrink = splat(np.float32(1.0 / math.sqrt(size)))
    for c in range(0, n, 16):
        values = load(x + 4 * c) * shrink
        if after != 0:
            values = values * load(after + 4 * c)
        store(x + 4 * c, values)


@kernel_step
def mix_rows(x, rows, size, mix, row, column, spare):  # type: ignore[no-untyped-def]
    """Combine the rows of x [rows, size] by a matrix, in place.

    mix: fp32, `row` bytes from a row and `column` from a column to the next. spare: room for x.
    """
    width = 16 if size >= 16 else 1
    for i in range(rows):
        for c in range(0, size, width):
            weights, out = mix + i * row, spare + 4 * (i * size + c)
            if width == 16:
                total = splat(np.float32(0.0))
                for j in range(rows):
                    weight = splat(load_one(weights + j * column, 0))
                    total = total + weight * load(x + 4 * (j * size + c))
                store(out, total)
            else:
                total = np.float32(0.0)
                for j in range(rows):
                    total += load_one(weights + j * column, 0) * load_one(x + 4 * (j * size + c), 0)
                store_one(out, total)
    for c in range(0, rows * size, width):
        if width == 16:
            store(x + 4 * c, load(spare + 4 * c))
        else:
            store_one(x + 4 * c, load_one(spare + 4 * c, 0))


@kernel_step
def squared(x, n):  # type: ignore[no-untyped-def]
    """Return the sum of the squares of n numbers; their row is filled up with 0."""
    total = splat(np.float32(0.0))
    for c in range(n, -(-n // 16) * 16):
        store_one(x + 4 * c, np.float32(0.0))
    for c in range(0, n, 16):
        values = load(x + 4 * c)
        total = total + values * values
    return halved(total)


@kernel_step
def rotate_group(x, n, size, signs, mix, spare):  # type: ignore[no-untyped-def]
    """Rotate n numbers, in place; arguments as in `rotate_row`."""
    hadamard(x, n, size, signs, 0)
    if n > size:
        mix_rows(x, n // size, size, mix, 4 * (n // size), 4, spare)


@kernel_step
def unrotate_group(x, n, size, signs, mix, spare):  # type: ignore[no-untyped-def]
    """Invert `rotate_group`."""
    if n > size:
        mix_rows(x, n // size, size, mix, 4, 4 * (n // size), spare)
    hadamard(x, n, size, 0, signs)


@kernel_step
def rotate_row(x, d, group, size, signs, mix, spare, squares):  # type: ignore[no-untyped-def]
    """Rotate a row of d numbers by groups, in place, and leave what squares of each sum up to.

    size: the power of 2 that divides a group; signs: fp32, of a group; mix: of what else divides
    it, fp32 [rows, rows].
    """
    for g in range(d // group):
        group_address = x + 4 * g * group
        rotate_group(group_address, group, size, signs, mix, spare)
        store_one(squares + 4 * g, squared(group_address, group))


@kernel_step
def unit_scales(norm, n, group, unit):  # type: ignore[no-untyped-def]
    """Turn n sums of squares into norms, and compute the factor of each group."""
    for i in range(0, n, 16):
        norms = root(load(norm + 4 * i))
        store(norm + 4 * i, norms)
        factor = splat(np.float32(1.0)) / nonzero(norms)
        store(unit + 4 * i, factor * splat(np.float32(math.sqrt(group))))


@kernel_step
def round_row(x, d, group, levels, ends, bits_x2, unit, codes):  # type: ignore[no-untyped-def]
    """Round a row of d rotated numbers, times the unit of each group, to codes; the row is lost.

    Instead of units, what squares of levels sum up to is left.
    """
    for g in range(d // group):
        group_address, out = x + 4 * g * group, codes + g * group
        scale = splat(load_one(unit + 4 * g, 0))
        for c in range(0, group, 16):
            values = load(group_address + 4 * c) * scale
            nearest(values, ends, levels, bits_x2, out + c, group_address + 4 * c)
        store_one(unit + 4 * g, squared(group_address, group))


@kernel_step
def limited(scale, meta):  # type: ignore[no-untyped-def]
    """Return scales, 0 or more, none of them larger than the format's largest."""
    if meta == 1:
        scale = minimum(scale, splat(np.float32(65504.0)))
    elif meta == 2:
        scale = minimum(scale, splat(np.float32(2.0**127 * 255 / 128)))
    elif meta == 3:
        scale = clamp_scale(scale)
    return scale


@kernel_step
def keep_scales(norm, squares, n, meta, out):  # type: ignore[no-untyped-def]
    """Store the scales of n groups, none of them larger than the format's largest."""
    for i in range(0, n, 16):
        rounded = maximum(root(load(squares + 4 * i)), splat(np.float32(1e-6)))
        store(norm + 4 * i, limited(load(norm + 4 * i) / rounded, meta))
    narrow(norm, n, meta, out)


@kernel_step
def restore_row(codes, d, group, size, signs, mix, levels, bits_x2, spare, scale, out):  # type: ignore[no-untyped-def]
    """Invert the rounding and the rotation: d numbers from their codes and scales."""
    for g in range(d // group):
        group_address, factor = out + 4 * g * group, splat(load_one(scale + 4 * g, 0))
        for c in range(0, group, 16):
            leveled(codes + g * group + c, levels, bits_x2, factor, group_address + 4 * c)
        unrotate_group(group_address, group, size, signs, mix, spare)
