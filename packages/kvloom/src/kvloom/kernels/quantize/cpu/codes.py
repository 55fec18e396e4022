"""Vector operations of packing: rounding to fp16, bf16 and fp8, encoding, and codes in bytes.

Decides how a number is rounded and how codes share bytes, to the last bit as torch and the
reference do: no fast-math flag lets LLVM contract or reorder. Groups are handled in `tiles`.
Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ....encoding import PACK_BLOCK
from ...cpu_runtime import kernel_step
from ...simd import (
    BF16,
    FP8,
    FP16,
    FP32,
    I32,
    I64,
    VF,
    VI,
    WIDTH,
    Lanes,
    constant,
    fma,
    gather_f32,
    lowered,
    maximum,
    minimum,
    read,
    splat,
)

I8 = ir.IntType(8)
_BYTES = ir.VectorType(I8, WIDTH)
_SIGN = -(1 << 31)
# per dtype: the least normal number, a number whose last bit is worth the least subnormal number
# and its bits, the difference of exponent biases, kept mantissa bits, the bits of infinity or 0
_NARROW = {
    FP16: (2.0**-14, 2.0**-1, 0x3F000000, 112, 10, 0x7C00),
    FP8: (2.0**-6, 2.0**14, 0x46800000, 120, 3, 0),
}


def _narrowed(b: Any, x: Any, dtype_code: int) -> Any:
    """Round x to a dtype, ties to even, and return its bits; fp8 only within its range."""
    if dtype_code == FP32:
        return x
    floats, ints = (ir.VectorType(lane, x.type.count) for lane in (VF.element, I32))
    width = 8 if dtype_code == FP8 else 16
    drop = {FP16: 13, BF16: 16, FP8: 20}[dtype_code]
    bits = b.bitcast(x, ints)
    size, sign = b.and_(bits, constant(~_SIGN, ints)), b.and_(bits, constant(_SIGN, ints))
    odd = b.and_(b.lshr(bits, constant(drop, ints)), constant(1, ints))
    near = b.lshr(
        b.add(size, b.add(odd, constant((1 << (drop - 1)) - 1, ints))), constant(drop, ints)
    )
    if dtype_code != BF16:
        least, whole, whole_bits, bias, keep, endless = _NARROW[dtype_code]
        magnitude = b.bitcast(size, floats)
        small = b.bitcast(b.fadd(magnitude, constant(whole, floats)), ints)
        small = b.sub(small, constant(whole_bits, ints))
        near = b.sub(near, constant(bias << keep, ints))
        near = b.select(b.fcmp_ordered("<", magnitude, constant(least, floats)), small, near)
        if endless:
            beyond = b.icmp_signed(">", near, constant(endless, ints))
            near = b.select(beyond, constant(endless, ints), near)
    near = b.or_(near, b.lshr(sign, constant(32 - width, ints)))
    return b.trunc(near, ir.VectorType(ir.IntType(width), x.type.count))


def _wide(b: Any, x: Any) -> Any:
    """Return a scalar as a vector of one lane."""
    undefined = ir.Constant(ir.VectorType(x.type, 1), ir.Undefined)
    return b.insert_element(undefined, x, ir.Constant(I32, 0))


def put_vector(b: Any, address: Any, x: Any) -> None:
    """Store a vector at an address of any alignment."""
    b.store(x, b.inttoptr(address, x.type.as_pointer()), align=1)


@intrinsic
def gather(ctx: Any, base: Any, slots: Any) -> Any:
    """Return the fp32 numbers of an array at sixteen slots, int32."""
    return lowered(
        Lanes(types.int64, types.int64),
        lambda b, base, slots: gather_f32(b, base, read(b, slots, VI)),
    )


@intrinsic
def above(ctx: Any, x: Any, end: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where x > end, else `no`."""
    return lowered(
        Lanes(Lanes, Lanes, Lanes, Lanes),
        lambda b, x, end, yes, no: b.select(b.fcmp_ordered(">", x, end), yes, no),
    )


@kernel_step
def clamp_scale(scale):  # type: ignore[no-untyped-def]
    """Clamp a scale so that fp8 rounds it neither to 0 nor beyond its largest number."""
    clamped = minimum(maximum(scale, splat(np.float32(2.0**-9))), splat(np.float32(448.0)))
    return above(scale, splat(np.float32(0.0)), clamped, scale)


@kernel_step
def nonzero(x):  # type: ignore[no-untyped-def]
    """Return x, and infinity where it is 0 (or less)."""
    return above(x, splat(np.float32(0.0)), x, splat(np.float32(np.inf)))


def _put_as(b: Any, address: Any, x: Any, dtype_code: Any) -> None:
    for code in (FP32, FP16, BF16, FP8):
        with b.if_then(b.icmp_signed("==", dtype_code, ir.Constant(I64, code))):
            put_vector(b, address, _narrowed(b, x, code))


@intrinsic
def put(ctx: Any, address: Any, x: Any, dtype_code: Any) -> Any:
    """Round sixteen numbers to a dtype and store them."""
    return lowered(types.void(types.int64, Lanes, types.int64), _put_as)


@intrinsic
def put_one(ctx: Any, address: Any, x: Any, dtype_code: Any) -> Any:
    """Round one number to a dtype and store it."""
    return lowered(
        types.void(types.int64, types.float32, types.int64),
        lambda b, a, x, dtype_code: _put_as(b, a, _wide(b, x), dtype_code),
    )


@intrinsic
def put_codes(ctx: Any, address: Any, codes: Any) -> Any:
    """Store sixteen codes, whole numbers or any that round to them, a byte each.

    2^23 plus a number rounds it to a whole one, ties to even.
    """

    def emit(b: Any, address: Any, codes: Any) -> None:
        whole = b.bitcast(b.fadd(codes, constant(2.0**23)), VI)
        put_vector(b, address, b.trunc(whole, _BYTES))

    return lowered(types.void(types.int64, Lanes), emit)


@intrinsic
def get_codes(ctx: Any, address: Any) -> Any:
    """Load sixteen codes, a byte each, as fp32."""
    return lowered(Lanes(types.int64), lambda b, a: b.sitofp(b.zext(read(b, a, _BYTES, 1), VI), VF))


@kernel_step
def encode(x, zero, step, top, out):  # type: ignore[no-untyped-def]
    """Store sixteen codes, a byte each: (x - zero) / step, to the nearest, ties to even, 0..top.

    An infinite step makes code 0.
    """
    code = maximum((x - zero) / step, splat(np.float32(0.0)))
    put_codes(out, minimum(code, top))


@kernel_step
def decode(codes, zero, step):  # type: ignore[no-untyped-def]
    """Return sixteen codes, a byte each, times step plus zero, rounded once."""
    return fma(get_codes(codes), step, zero)


def _joined(b: Any, parts: list[Any], bits: int) -> Any:
    packed = parts[0]
    for t, part in enumerate(parts[1:], 1):
        packed = b.or_(packed, b.shl(part, constant(t * bits, part.type)))
    return packed


def _join(b: Any, codes: list[Any], bits: float) -> list[Any]:
    """Return the byte rows of a pack block from the codes of its tokens."""
    kind = codes[0].type
    if bits == 3:
        low = [b.and_(x, constant(3, kind)) for x in codes]
        high = [b.lshr(x, constant(2, kind)) for x in codes]
        return [_joined(b, low[:4], 2), _joined(b, low[4:], 2), _joined(b, high, 1)]
    if bits == 1.5:
        packed = codes[4]
        for x in codes[3::-1]:
            packed = b.add(b.add(packed, b.add(packed, packed)), x)
        return [packed]
    return [_joined(b, codes, int(bits))]


def _split(b: Any, rows: list[Any], bits: float) -> list[Any]:
    """Invert `_join`."""
    kind = rows[0].type
    if bits == 1.5:
        wide = ir.VectorType(ir.IntType(16), kind.count)
        number = b.zext(rows[0], wide)
        digits = [b.udiv(number, constant(3**t, wide)) for t in range(5)]
        return [b.trunc(b.urem(x, constant(3, wide)), kind) for x in digits]

    def part(row: int, low: int, count: int) -> Any:
        return b.and_(b.lshr(rows[row], constant(low, kind)), constant((1 << count) - 1, kind))

    if bits == 3:
        high = [b.shl(part(2, t, 1), constant(2, kind)) for t in range(8)]
        return [b.or_(part(t // 4, t % 4 * 2, 2), high[t]) for t in range(8)]
    return [part(0, t * int(bits), int(bits)) for t in range(8 // int(bits))]


def _between(of: Any, parts: int, width: int) -> Any:
    """Emit code that reads `parts` rows of bytes, converts them by `of` and stores the result."""

    def emit(
        b: Any, rows: Any, stride: Any, out: Any, out_stride: Any, bits_x2: Any, *_: Any
    ) -> None:
        kind = ir.VectorType(I8, width)

        def row(first: Any, step: Any, i: int) -> Any:
            return b.add(first, b.mul(step, ir.Constant(I64, i)))

        for bits, per_block in PACK_BLOCK.items():
            with b.if_then(b.icmp_signed("==", bits_x2, ir.Constant(I64, int(2 * bits)))):
                byte_rows = [
                    read(b, row(rows, stride, i), kind, 1) for i in range(per_block[parts])
                ]
                for i, vector in enumerate(of(b, byte_rows, bits)):
                    put_vector(b, row(out, out_stride, i), vector)

    return emit


@intrinsic(prefer_literal=True)
def join(
    ctx: Any, codes: Any, code_stride: Any, out: Any, stride: Any, bits_x2: Any, width: Any
) -> Any:
    """Pack `width` channels of a block of tokens into its byte rows, laid out as in `reference`.

    codes: bytes, `code_stride` from a token to the next. out: byte rows, `stride` apart. bits_x2:
    twice the bits of a code.
    """
    emit = _between(_join, 0, width.literal_value)
    return lowered(types.void(*[types.int64] * 5, width), emit)


@intrinsic(prefer_literal=True)
def split(
    ctx: Any, rows: Any, stride: Any, out: Any, code_stride: Any, bits_x2: Any, width: Any
) -> Any:
    """Invert `join`: byte rows of a pack block to the codes of its tokens."""
    emit = _between(_split, 1, width.literal_value)
    return lowered(types.void(*[types.int64] * 5, width), emit)
