"""The kernel that writes a step's keys and values: a copy that looks at what it copies.

A number's bits without the sign, as an integer, grow with its magnitude; infinity comes after all
numbers and NaN after infinity. So one comparison of integers says whether a number may be held.
Importing this imports Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ... import cpu_runtime as team
from ... import simd as lanes
from ...cpu_runtime import Kernel, sources, store_whole, whole
from ...simd import I64, WIDTH, read, same, spread

SIDE, SIDES = 6, 14  # where a job's first side begins, and how many numbers a side has


@intrinsic(prefer_literal=True)
def moved(ctx: Any, source: Any, target: Any, most: Any, width: Any) -> Any:
    """Copy sixteen numbers of `width` bytes, a constant.

    Returns a bit for each whose magnitude's bits are above `most`.
    """
    bits = 8 * width.literal_value

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target, most, _ = args
        one = ir.IntType(bits)
        kind = ir.VectorType(one, WIDTH)
        x = read(b, source, kind, bits // 8)
        b.store(x, b.inttoptr(target, kind.as_pointer()), align=bits // 8)
        limit = spread(b, b.trunc(most, one))
        size = b.and_(x, same((1 << (bits - 1)) - 1, kind))
        above = b.icmp_unsigned(">", size, limit)
        return b.zext(b.bitcast(above, ir.IntType(WIDTH)), I64)

    return types.int64(types.int64, types.int64, types.int64, width), codegen


@cache
def kernel(width: int) -> Kernel:
    """Copies rows of numbers of `width` bytes.

    Its job: B, Hk, T, D, how many sides; then of each side where tokens are read and the numbers
    to the next along each dimension, where storage begins and the same, its token to begin with,
    where each head's own is added or 0, the bits of the largest magnitude, and a number that is
    not 0 afterwards if one was larger.
    """
    emitters = sources(lanes, team)

    def append(job):  # type: ignore[no-untyped-def]
        if emitters == 0:  # never: code on the disk belongs to the sources that emitted it
            return
        rows, heads, tokens, d = whole(job, 1), whole(job, 2), whole(job, 3), whole(job, 4)
        for i in range(whole(job, 5)):
            side = job + 8 * (SIDE + i * SIDES)
            each, most, found = whole(side, 11), whole(side, 12), 0
            for b in range(rows):
                for h in range(heads):
                    begin = whole(side, 10)
                    if each != 0:
                        begin += whole(each, b * heads + h)
                    for t in range(tokens):
                        x = b * whole(side, 1) + h * whole(side, 2) + t * whole(side, 3)
                        y = b * whole(side, 6) + h * whole(side, 7)
                        y += (t + begin) * whole(side, 8)
                        source, target = whole(side, 0) + x * width, whole(side, 5) + y * width
                        for c in range(0, d * width, WIDTH * width):
                            found |= moved(source + c, target + c, most, width)
            store_whole(side + 8 * (SIDES - 1), found)

    return Kernel(append, f"append {width}")
