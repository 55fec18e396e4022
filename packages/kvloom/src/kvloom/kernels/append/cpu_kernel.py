"""The kernel that writes a step's keys and values, and checks their range while it copies them.

The bits of a number without its sign, read as an integer, grow with its magnitude; infinity follows
all numbers and NaN follows infinity. So one integer comparison checks a number. Importing this
imports Numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..arguments import APPEND
from ..cpu_runtime import Kernel, load_int, read_arguments
from ..simd import I64, WIDTH, broadcast, constant, read


@intrinsic(prefer_literal=True)
def copy_checked(ctx: Any, source: Any, target: Any, max_bits: Any, width: Any) -> Any:
    """Copy sixteen numbers of `width` bytes, a constant.

    Returns one bit per number, set if the bits of its magnitude exceed `max_bits`.
    """
    bits = 8 * width.literal_value

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        source, target, max_bits, _ = args
        element = ir.IntType(bits)
        vector = ir.VectorType(element, WIDTH)
        x = read(b, source, vector, bits // 8)
        b.store(x, b.inttoptr(target, vector.as_pointer()), align=bits // 8)
        limit = broadcast(b, b.trunc(max_bits, element))
        magnitude = b.and_(x, constant((1 << (bits - 1)) - 1, vector))
        above = b.icmp_unsigned(">", magnitude, limit)
        return b.zext(b.bitcast(above, ir.IntType(WIDTH)), I64)

    return types.int64(types.int64, types.int64, types.int64, width), codegen


@cache
def kernel(width: int) -> Kernel:
    """Compile the copy of numbers of `width` bytes; see `append.append` for the call.

    Reference: `reference.append`; results are the same bytes.
    """
    layout = APPEND.dtype

    def append(args):  # type: ignore[no-untyped-def]
        a = read_arguments(args, layout)
        exceeded = 0
        for side in (a.keys, a.values):
            source, target = side.source, side.target
            per_head, max_bits = side.begin_per_head, side.max_bits
            for b in range(a.batch):
                for h in range(a.heads):
                    begin = side.begin
                    if per_head != 0:
                        begin += load_int(per_head, b * a.heads + h)
                    for t in range(a.tokens):
                        x = b * source.batch + h * source.head + t * source.row
                        y = b * target.batch + h * target.head + (t + begin) * target.row
                        x, y = source.address + x * width, target.address + y * width
                        for c in range(0, a.head_dim * width, WIDTH * width):
                            exceeded |= copy_checked(x + c, y + c, max_bits, width)
        a.exceeded = exceeded

    return Kernel(append, f"append {width}")
