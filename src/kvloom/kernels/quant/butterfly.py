"""Rotating a row of channels, rounding it to levels, and back: the steps for rotated groups.

Decides nothing of the arithmetic, which is `rotated`'s to the last bit: the same sums in the same
order. Rows of numbers are fp32, padded to whole vectors; codes are a byte each. Addresses are int64.
Importing this imports Numba.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from ..lanes import (
    F32,
    I32,
    I64,
    VF,
    VI,
    WIDTH,
    Lanes,
    add,
    at,
    fused,
    load,
    load_one,
    mul,
    read,
    same,
    splat,
    spread,
    store,
    store_one,
    write,
)
from .numbers import made, put_vector, sub
from .ref import ATOM, top

_BYTES = ir.VectorType(ir.IntType(8), WIDTH)
MOST = 15  # levels above the lowest that are met one by one; of more, the place is searched


def _number(b: Any, base: Any, i: int) -> Any:
    """Number i of a table in all lanes."""
    return spread(b, read(b, at(b, base, 4 * i), F32))


def _each(b: Any, base: Any, index: Any) -> Any:
    """Sixteen numbers of a table, by lanes of int32."""
    found = ir.Constant(VF, ir.Undefined)
    for i in range(WIDTH):
        lane = ir.Constant(I32, i)
        where = b.shl(b.zext(b.extract_element(index, lane), I64), ir.Constant(I64, 2))
        found = b.insert_element(found, read(b, b.add(base, where), F32), lane)
    return found


def _forms(b: Any, twice: Any) -> Any:
    """The highest code of every format there is, where twice its bits are asked for."""
    for bits in ATOM:
        with b.if_then(b.icmp_signed("==", twice, ir.Constant(I64, int(2 * bits)))):
            yield top(bits)


@intrinsic(prefer_literal=True)
def butterfly(ctx: Any, x: Any, half: Any) -> Any:
    """a + b where a lane is a, a - b where it is b: a, b are `half` lanes apart, in turns."""
    apart = half.literal_value
    others = ir.Constant(VI, [i ^ apart for i in range(WIDTH)])
    signs = ir.Constant(VF, [-1.0 if i & apart else 1.0 for i in range(WIDTH)])

    def emit(b: Any, x: Any, _: Any) -> Any:
        other = b.shuffle_vector(x, ir.Constant(VF, ir.Undefined), others)
        return fused(b, x, signs, other)

    return made(Lanes(Lanes, half), emit)


@intrinsic
def halved(ctx: Any, x: Any) -> Any:
    """The sum of all lanes: the upper half is added to the lower until one is left."""

    def emit(b: Any, x: Any) -> Any:
        while x.type.count > 1:
            half = x.type.count // 2
            kind, none = ir.VectorType(I32, half), ir.Constant(x.type, ir.Undefined)
            low, high = (
                b.shuffle_vector(x, none, ir.Constant(kind, list(range(i, i + half))))
                for i in (0, half)
            )
            x = b.fadd(low, high)
        return b.extract_element(x, ir.Constant(I32, 0))

    return made(types.float32(Lanes), emit)


@intrinsic
def nearest(ctx: Any, x: Any, ends: Any, levels: Any, bits: Any, codes: Any, to: Any) -> Any:
    """Store the codes and the levels of sixteen numbers.

    ends: fp32, up to where each level but the last is the nearest; levels: fp32. bits: twice the
    format's.
    """

    def emit(b: Any, x: Any, ends: Any, levels: Any, twice: Any, codes: Any, to: Any) -> None:
        for most in _forms(b, twice):
            code = same(0, VI)
            if most > MOST:
                step = (most + 1) // 2
                while step:
                    end = _each(b, at(b, ends, 4 * (step - 1)), code)
                    above = b.fcmp_ordered(">", x, end)
                    code = b.select(above, b.add(code, same(step, VI)), code)
                    step //= 2
                level = _each(b, levels, code)
            else:
                level = _number(b, levels, 0)
                for i in range(most):
                    above = b.fcmp_ordered(">", x, _number(b, ends, i))
                    code = b.sub(code, b.sext(above, VI))
                    level = b.select(above, _number(b, levels, i + 1), level)
            put_vector(b, codes, b.trunc(code, _BYTES))
            write(b, to, level)

    return made(types.void(Lanes, *[types.int64] * 5), emit)


@intrinsic
def leveled(ctx: Any, codes: Any, levels: Any, bits: Any, scale: Any, to: Any) -> Any:
    """Store the levels of sixteen codes, times a scale."""

    def emit(b: Any, codes: Any, levels: Any, twice: Any, scale: Any, to: Any) -> None:
        code = b.zext(read(b, codes, _BYTES, 1), VI)
        for most in _forms(b, twice):
            if most > MOST:
                level = _each(b, levels, code)
            else:
                level = _number(b, levels, 0)
                for i in range(most):
                    above = b.icmp_signed(">", code, same(i, VI))
                    level = b.select(above, _number(b, levels, i + 1), level)
            write(b, to, b.fmul(level, scale))

    return made(types.void(types.int64, types.int64, types.int64, Lanes, types.int64), emit)


@njit
def hadamard(x, n, size, before, after):  # type: ignore[no-untyped-def]
    """Blocks of `size` numbers, a power of 2, times the Hadamard matrix, in place.

    before, after: fp32 [n], by which numbers are multiplied, or 0.
    """
    for c in range(0, n, 16):
        one = load(x + 4 * c)
        if before != 0:
            one = mul(one, load(before + 4 * c))
        if size > 1:
            one = butterfly(one, 1)
        if size > 2:
            one = butterfly(one, 2)
        if size > 4:
            one = butterfly(one, 4)
        if size > 8:
            one = butterfly(one, 8)
        store(x + 4 * c, one)
    half = 16
    while half < size:
        for block in range(0, n, 2 * half):
            for c in range(block, block + half, 16):
                a, b = load(x + 4 * c), load(x + 4 * (c + half))
                store(x + 4 * c, add(a, b))
                store(x + 4 * (c + half), sub(a, b))
        half *= 2
    shrink = splat(np.float32(1.0 / math.sqrt(size)))
    for c in range(0, n, 16):
        one = mul(load(x + 4 * c), shrink)
        if after != 0:
            one = mul(one, load(after + 4 * c))
        store(x + 4 * c, one)


@njit
def mixed(x, rows, size, mix, row, column, spare):  # type: ignore[no-untyped-def]
    """Combine the rows of x [rows, size] by a matrix, in place.

    mix: fp32, `row` bytes from a row and `column` from a column to the next. spare: room for x.
    """
    width = 16 if size >= 16 else 1
    for i in range(rows):
        for c in range(0, size, width):
            by, to = mix + i * row, spare + 4 * (i * size + c)
            if width == 16:
                found = splat(np.float32(0.0))
                for j in range(rows):
                    weight = splat(load_one(by + j * column, 0))
                    found = add(found, mul(weight, load(x + 4 * (j * size + c))))
                store(to, found)
            else:
                one = np.float32(0.0)
                for j in range(rows):
                    one += load_one(by + j * column, 0) * load_one(x + 4 * (j * size + c), 0)
                store_one(to, one)
    for c in range(0, rows * size, width):
        if width == 16:
            store(x + 4 * c, load(spare + 4 * c))
        else:
            store_one(x + 4 * c, load_one(spare + 4 * c, 0))


@njit
def length(x, n, padded):  # type: ignore[no-untyped-def]
    """|x| of n numbers in a row with room for `padded`, which is set to 0."""
    for c in range(n, padded):
        store_one(x + 4 * c, np.float32(0.0))
    total = splat(np.float32(0.0))
    for c in range(0, padded, 16):
        one = load(x + 4 * c)
        total = add(total, mul(one, one))
    return np.float32(math.sqrt(halved(total)))


@njit
def round_row(x, d, group, size, signs, mix, levels, ends, bits, spare, scale, codes):  # type: ignore[no-untyped-def]
    """Rotate a row of d numbers by groups and round it to levels; the row is lost.

    Leaves a code a number and a scale a group, fp32. size: the power of 2 that divides a group;
    signs: fp32, of a group; mix: of what else divides it, fp32 [rows, rows].
    """
    rows, padded = group // size, -(-group // 16) * 16
    for g in range(d // group):
        at_group, to = x + 4 * g * group, codes + g * group
        hadamard(at_group, padded, size, signs, 0)
        if rows > 1:
            mixed(at_group, rows, size, mix, 4 * rows, 4, spare)
        norm = length(at_group, group, padded)
        root = np.float32(math.sqrt(group))
        unit = splat(root if norm == 0 else np.float32(1.0) / norm * root)
        for c in range(0, padded, 16):
            one = mul(load(at_group + 4 * c), unit)
            nearest(one, ends, levels, bits, to + c, at_group + 4 * c)
        rounded = max(length(at_group, group, padded), np.float32(1e-6))
        store_one(scale + 4 * g, norm / rounded)


@njit
def restore_row(codes, d, group, size, signs, mix, levels, bits, spare, scale, to):  # type: ignore[no-untyped-def]
    """Invert `round_row`: d numbers from their codes and scales."""
    rows, padded = group // size, -(-group // 16) * 16
    for g in range(d // group):
        at_group, by = to + 4 * g * group, splat(load_one(scale + 4 * g, 0))
        for c in range(0, padded, 16):
            leveled(codes + g * group + c, levels, bits, by, at_group + 4 * c)
        if rows > 1:
            mixed(at_group, rows, size, mix, 4, 4 * rows, spare)
        hadamard(at_group, padded, size, 0, signs)
