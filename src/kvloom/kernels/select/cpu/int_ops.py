"""Bytes, integers and a vector minimum for the kernels of this family.

Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...simd import BF16, FP16, FP32, I32, I64, Lanes, read

SIZE = {FP32: 4, FP16: 2, BF16: 2}  # bytes of a number


def _reads(kind: Any) -> Any:
    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return b.sext(read(b, args[0], kind, 1), I64)

    return types.int64(types.int64), codegen


@intrinsic
def byte(ctx: Any, address: Any) -> Any:
    """The byte at an address; a bool's is 0 or 1."""
    return _reads(ir.IntType(8))


@intrinsic
def small(ctx: Any, address: Any) -> Any:
    """The int32 at an address."""
    return _reads(I32)


@intrinsic
def smaller(ctx: Any, a: Any, b: Any) -> Any:
    """The smaller of a and b, lane by lane."""

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        x, y = args
        return b.select(b.fcmp_ordered("<", x, y), x, y)

    return Lanes(Lanes, Lanes), codegen
