"""Vector operations of packing: rounding to fp16, bf16 and fp8, encoding, and codes in bytes.

Decides how a number is rounded and how codes share bytes, to the last bit as torch and the
reference do: no fast-math flag lets LLVM contract or reorder. Groups are handled in `tiles`.
Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...simd import BF16, FP8, FP16, FP32, I32, I64, VF, WIDTH, Lanes, at, fused, made, read, same
from ..byte_layout import ATOM

I8 = ir.IntType(8)
_SIGN = -(1 << 31)
# per format: dropped mantissa bits, the least normal number, a number whose last bit is worth the
# least subnormal number, the difference of exponent biases, kept mantissa bits
_NARROW = {
    FP16: (13, 2.0**-14, 2.0**-1, 112, 10),
    BF16: (16, 0.0, 0.0, 0, 7),
    FP8: (20, 2.0**-6, 2.0**14, 120, 3),
}


def _vectors(width: int) -> tuple[Any, Any, Any]:
    return tuple(ir.VectorType(kind, width) for kind in (VF.element, I32, I8))


def _rounded(b: Any, x: Any, kind: int) -> Any:
    """Round x to a format, ties to even, as fp32; fp8 only within its range."""
    if kind == FP32:
        return x
    floats, ints, _ = _vectors(x.type.count)
    drop, least, whole, _, _ = _NARROW[kind]
    bits = b.bitcast(x, ints)
    odd = b.and_(b.lshr(bits, same(drop, ints)), same(1, ints))
    near = b.add(bits, b.add(odd, same((1 << (drop - 1)) - 1, ints)))
    near = b.and_(near, same(-(1 << drop), ints))
    if kind == BF16:
        return b.bitcast(near, floats)
    size = b.bitcast(b.and_(bits, same(~_SIGN, ints)), floats)
    sign = b.and_(bits, same(_SIGN, ints))
    small = b.fsub(b.fadd(size, same(whole, floats)), same(whole, floats))
    near = b.select(
        b.fcmp_ordered("<", size, same(least, floats)), b.or_(b.bitcast(small, ints), sign), near
    )
    if kind == FP16:  # 65536 has no place in it
        beyond = b.icmp_signed(">=", b.and_(near, same(~_SIGN, ints)), same(0x47800000, ints))
        near = b.select(beyond, b.or_(sign, same(0x7F800000, ints)), near)
    return b.bitcast(near, floats)


def _stored(b: Any, x: Any, kind: int) -> Any:
    """Return the bits of x, which the format holds exactly."""
    if kind == FP32:
        return x
    floats, ints, _ = _vectors(x.type.count)
    drop, least, whole, bias, keep = _NARROW[kind]
    short = ir.VectorType(ir.IntType(8 if kind == FP8 else 16), x.type.count)
    bits = b.bitcast(x, ints)
    if kind == BF16:
        return b.trunc(b.lshr(bits, same(16, ints)), short)
    size = b.and_(bits, same(~_SIGN, ints))
    up, top = (16, 0x8000) if kind == FP16 else (24, 0x80)
    sign = b.and_(b.lshr(bits, same(up, ints)), same(top, ints))
    found = b.sub(b.lshr(size, same(drop, ints)), same(bias << keep, ints))
    as_float = b.bitcast(size, floats)
    small = b.fptosi(b.fmul(as_float, same(2.0**23 / whole, floats)), ints)
    found = b.select(b.fcmp_ordered("<", as_float, same(least, floats)), small, found)
    if kind == FP16:
        endless = b.icmp_signed(">=", size, same(0x7F800000, ints))
        found = b.select(endless, same(0x7C00, ints), found)
    return b.trunc(b.or_(found, sign), short)


def _wide(b: Any, x: Any) -> Any:
    """A scalar as a vector of one lane."""
    none = ir.Constant(ir.VectorType(x.type, 1), ir.Undefined)
    return b.insert_element(none, x, ir.Constant(I32, 0))


def put_vector(b: Any, address: Any, x: Any) -> None:
    """Store a vector at an address of any alignment."""
    b.store(x, b.inttoptr(address, x.type.as_pointer()), align=1)


def _reduced(b: Any, x: Any, sign: str) -> Any:
    while x.type.count > 1:
        half = x.type.count // 2
        kind = ir.VectorType(I32, half)
        none = ir.Constant(x.type, ir.Undefined)
        parts = [
            b.shuffle_vector(x, none, ir.Constant(kind, list(range(lo, lo + half))))
            for lo in (0, half)
        ]
        x = b.select(b.fcmp_ordered(sign, *parts), *parts)
    return b.extract_element(x, ir.Constant(I32, 0))


@intrinsic
def min_lane(ctx: Any, x: Any) -> Any:
    """The smallest lane; no NaN among them."""
    return made(types.float32(Lanes), lambda b, x: _reduced(b, x, "<"))


@intrinsic
def max_lane(ctx: Any, x: Any) -> Any:
    """The largest lane; no NaN among them."""
    return made(types.float32(Lanes), lambda b, x: _reduced(b, x, ">"))


@intrinsic
def gather(ctx: Any, base: Any, slots: Any) -> Any:
    """The fp32 numbers of an array at sixteen slots, int32."""

    def emit(b: Any, base: Any, slots: Any) -> Any:
        found = ir.Constant(VF, ir.Undefined)
        for i in range(WIDTH):
            slot = b.zext(read(b, at(b, slots, 4 * i), I32), I64)
            one = read(b, b.add(base, b.shl(slot, ir.Constant(I64, 2))), VF.element)
            found = b.insert_element(found, one, ir.Constant(I32, i))
        return found

    return made(Lanes(types.int64, types.int64), emit)


@intrinsic
def clamp_scale(ctx: Any, scale: Any) -> Any:
    """Clamp a scale so that fp8 rounds it neither to 0 nor beyond its largest number."""

    def emit(b: Any, x: Any) -> Any:
        for sign, end in ((">", 2.0**-9), ("<", 448.0)):
            x = b.select(
                b.or_(b.fcmp_ordered(sign, x, same(end)), b.fcmp_ordered("<=", x, same(0.0))),
                x,
                same(end),
            )
        return x

    return made(Lanes(Lanes), emit)


def _put_as(b: Any, address: Any, x: Any, kind: Any) -> None:
    for fmt in (FP32, FP16, BF16, FP8):
        with b.if_then(b.icmp_signed("==", kind, ir.Constant(I64, fmt))):
            put_vector(b, address, _stored(b, _rounded(b, x, fmt), fmt))


@intrinsic
def put(ctx: Any, address: Any, x: Any, kind: Any) -> Any:
    """Round sixteen numbers to a format and store them."""
    return made(types.void(types.int64, Lanes, types.int64), _put_as)


@intrinsic
def put_one(ctx: Any, address: Any, x: Any, kind: Any) -> Any:
    """Round one number to a format and store it."""
    return made(
        types.void(types.int64, types.float32, types.int64),
        lambda b, a, x, kind: _put_as(b, a, _wide(b, x), kind),
    )


@intrinsic
def encode(ctx: Any, x: Any, zero: Any, step: Any, top: Any, to: Any) -> Any:
    """Store sixteen codes, a byte each: (x - zero) / step, to the nearest, ties to even, 0..top.

    An infinite step makes code 0. 2^23 plus a number rounds it to a whole one.
    """

    def emit(b: Any, x: Any, zero: Any, step: Any, top: Any, to: Any) -> None:
        code = b.fdiv(b.fsub(x, zero), step)
        code = b.select(b.fcmp_ordered(">", code, same(0.0)), code, same(0.0))
        code = b.select(b.fcmp_ordered("<", code, top), code, top)
        _, ints, bytes_ = _vectors(WIDTH)
        put_vector(b, to, b.trunc(b.bitcast(b.fadd(code, same(2.0**23)), ints), bytes_))

    return made(types.void(Lanes, Lanes, Lanes, Lanes, types.int64), emit)


@intrinsic
def decode(ctx: Any, codes: Any, zero: Any, step: Any) -> Any:
    """Sixteen codes, a byte each, times step plus zero, rounded once."""

    def emit(b: Any, codes: Any, zero: Any, step: Any) -> Any:
        _, ints, bytes_ = _vectors(WIDTH)
        code = b.sitofp(b.zext(read(b, codes, bytes_, 1), ints), VF)
        return fused(b, code, step, zero)

    return made(Lanes(types.int64, Lanes, Lanes), emit)


def _joined(b: Any, parts: list[Any], bits: int) -> Any:
    found = parts[0]
    for t, part in enumerate(parts[1:], 1):
        found = b.or_(found, b.shl(part, same(t * bits, part.type)))
    return found


def _join(b: Any, each: list[Any], bits: float) -> list[Any]:
    """Return the byte rows of a pack block from the codes of its tokens."""
    kind = each[0].type
    if bits == 3:
        low = [b.and_(x, same(3, kind)) for x in each]
        high = [b.lshr(x, same(2, kind)) for x in each]
        return [_joined(b, low[:4], 2), _joined(b, low[4:], 2), _joined(b, high, 1)]
    if bits == 1.5:
        found = each[4]
        for x in each[3::-1]:
            found = b.add(b.add(found, b.add(found, found)), x)
        return [found]
    return [_joined(b, each, int(bits))]


def _split(b: Any, rows: list[Any], bits: float) -> list[Any]:
    """Invert `_join`."""
    kind = rows[0].type
    if bits == 1.5:
        wide = ir.VectorType(ir.IntType(16), kind.count)
        number = b.zext(rows[0], wide)
        digits = [b.udiv(number, same(3**t, wide)) for t in range(5)]
        return [b.trunc(b.urem(x, same(3, wide)), kind) for x in digits]

    def part(row: int, low: int, count: int) -> Any:
        return b.and_(b.lshr(rows[row], same(low, kind)), same((1 << count) - 1, kind))

    if bits == 3:
        high = [b.shl(part(2, t, 1), same(2, kind)) for t in range(8)]
        return [b.or_(part(t // 4, t % 4 * 2, 2), high[t]) for t in range(8)]
    return [part(0, t * int(bits), int(bits)) for t in range(8 // int(bits))]


def _between(of: Any, parts: int, width: int) -> Any:
    """Emit code that reads `parts` rows of bytes, converts them by `of` and stores the result."""

    def emit(b: Any, rows: Any, stride: Any, to: Any, to_stride: Any, bits: Any, *_: Any) -> None:
        kind = ir.VectorType(I8, width)

        def row(first: Any, step: Any, i: int) -> Any:
            return b.add(first, b.mul(step, ir.Constant(I64, i)))

        for fmt, atom in ATOM.items():
            with b.if_then(b.icmp_signed("==", bits, ir.Constant(I64, int(2 * fmt)))):
                held = [read(b, row(rows, stride, i), kind, 1) for i in range(atom[parts])]
                for i, found in enumerate(of(b, held, fmt)):
                    put_vector(b, row(to, to_stride, i), found)

    return emit


@intrinsic(prefer_literal=True)
def join(ctx: Any, codes: Any, gap: Any, to: Any, stride: Any, bits: Any, width: Any) -> Any:
    """Pack `width` channels of a block of tokens into its byte rows, laid out as in `reference`.

    codes: bytes, `gap` from a token to the next; to: byte rows, `stride` apart. bits: twice the
    format's.
    """
    emit = _between(_join, 0, width.literal_value)
    return made(types.void(*[types.int64] * 5, width), emit)


@intrinsic(prefer_literal=True)
def split(ctx: Any, rows: Any, stride: Any, to: Any, gap: Any, bits: Any, width: Any) -> Any:
    """Invert `join`: byte rows of a pack block to the codes of its tokens."""
    emit = _between(_split, 1, width.literal_value)
    return made(types.void(*[types.int64] * 5, width), emit)


@intrinsic
def nonzero(ctx: Any, x: Any) -> Any:
    """x, and infinity where it is 0 (or less)."""
    return made(
        Lanes(Lanes),
        lambda b, x: b.select(b.fcmp_ordered(">", x, same(0.0)), x, same(float("inf"))),
    )


@intrinsic
def clear(ctx: Any, address: Any) -> Any:
    """Store sixteen bytes of 0."""
    kind = ir.VectorType(I8, WIDTH)
    return made(types.void(types.int64), lambda b, a: put_vector(b, a, same(0, kind)))
