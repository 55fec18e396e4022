"""How packed codes become numbers in registers: what of a format is constant in compiled code.

A code c of b bits is placed on top of the mantissa of 1.0: x = 1 + c / 2^b, by a shift, an AND and
an OR, without a conversion. Value = c * scale + zero = x * S + Z with S = 2^b * scale and
Z = zero - S. At 1 and 1.5 bit x is the code itself, S the scale and Z the zero. For a rotated
format x is the code's level, and there is no Z. Decides nothing about which tokens are read, nor in
what order.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from ...simd import (
    F32,
    FP32,
    I32,
    I64,
    SIZE,
    VF,
    VI,
    WIDTH,
    add_bytes,
    broadcast,
    constant,
    features,
    gather_f32,
    muladd,
    read,
    read_f32,
)
from .variant import CHANNEL, NONE, RUN, SideConstants

_ONE = 0x3F800000


def _codes(b: Any, rows: list[Any], constants: SideConstants) -> list[Any]:
    """Return x of the tokens of a pack block from its byte rows; for levels the codes, int32."""
    bits = constants.bits
    numbers = [b.zext(read(b, row, ir.VectorType(ir.IntType(8), WIDTH), 1), VI) for row in rows]

    def part(row: int, low: int, count: int, bit: int) -> Any:
        """Return `count` bits of a byte row from bit `low`, moved to `bit`."""
        x = numbers[row]
        x = b.shl(x, constant(bit - low, VI)) if bit >= low else b.lshr(x, constant(low - bit, VI))
        return b.and_(x, constant(((1 << count) - 1) << bit, VI))

    if bits == 1.5:
        return _digits(b, numbers[0], constants)
    vectors = []
    for t in range(constants.per_block[0]):
        begin = 0 if constants.levels else 23 - int(bits)
        if bits == 3:
            code = b.or_(part(t // 4, t % 4 * 2, 2, begin), part(2, t, 1, begin + 2))
        elif bits == 1 and not constants.levels:
            high = b.shl(numbers[0], constant(31 - t, VI))
            ones = b.and_(b.ashr(high, constant(31, VI)), constant(_ONE, VI))
            vectors.append(b.bitcast(ones, VF))
            continue
        else:
            code = part(0, t * int(bits), int(bits), begin)
        vectors.append(code if constants.levels else b.bitcast(b.or_(code, constant(_ONE, VI)), VF))
    return vectors


def _digits(b: Any, byte: Any, constants: SideConstants) -> list[Any]:
    """Return the five digits of a number below 3^5, the lowest first.

    270 / 2^16 is 1 / 243 and a little more: the highest digit is the whole part of three times
    that fraction, and so on with what is left.
    """
    digits, rest = [], b.mul(byte, constant(270, VI))
    for _ in range(5):
        three = b.mul(rest, constant(3, VI))
        digit = b.lshr(three, constant(16, VI))
        digits.append(digit if constants.levels else b.sitofp(digit, VF))
        rest = b.and_(three, constant(0xFFFF, VI))
    return digits[::-1]


def tokens(b: Any, base: Any, stride: Any, v: int, constants: SideConstants) -> list[Any]:
    """Return channels 16v to 16v + 15 of a pack block's tokens: as `_codes`, or exact numbers."""
    if not constants.bits_x2:
        dtype_code = constants.exact_dtype
        return [read_f32(b, add_bytes(b, base, v * WIDTH * SIZE[dtype_code]), dtype_code)]
    rows = [b.add(base, b.mul(stride, ir.Constant(I64, i))) for i in range(constants.per_block[1])]
    return _codes(b, [add_bytes(b, row, v * WIDTH) for row in rows], constants)


class Meta(NamedTuple):
    """Addresses of S, of Z (`z_offset` bytes after S) and of a table of groups or levels."""

    base: Any
    z_offset: Any
    table: Any  # int32 [d], each channel's group; or fp32 [16], levels
    lane_isa: str  # instructions: avx512, avx2 or none
    dtype_code: int = FP32  # of S and Z; by map, fp32

    def scaled(self, b: Any, x: Any, t: int, v: int, d: int, constants: SideConstants) -> Any:
        """Return channels 16v to 16v + 15 of token t of those at hand, from its x."""
        if constants.levels:
            x = table_lookup(b, self.lane_isa, self.table, x, 1)
        if constants.by == NONE:
            return x
        size, dtype_code = SIZE[self.dtype_code], self.dtype_code
        if constants.by == CHANNEL:
            big = add_bytes(b, self.base, WIDTH * size * v)
            both = (big, b.add(big, self.z_offset))
            return muladd(b, x, *(read_f32(b, place, dtype_code) for place in both))
        if constants.by == RUN:
            group = t * constants.across + v * WIDTH // constants.group
            big = add_bytes(b, self.base, size * group)
            if constants.levels:
                return b.fmul(x, load_broadcast(b, big, dtype_code))
            both = (big, b.add(big, self.z_offset))
            return muladd(b, x, *(load_broadcast(b, place, dtype_code) for place in both))
        index = read(b, add_bytes(b, self.table, 64 * v), VI)
        big = add_bytes(b, self.base, 4 * t * constants.across)
        both, tables = (big, b.add(big, self.z_offset)), -(-constants.across // WIDTH)
        parts = (table_lookup(b, self.lane_isa, place, index, tables) for place in both)
        return muladd(b, x, *parts)


def load_broadcast(b: Any, address: Any, dtype_code: int = FP32) -> Any:
    """Load one number into all lanes."""
    return broadcast(b, b.extract_element(read_f32(b, address, dtype_code, 1), ir.Constant(I32, 0)))


def lane_isa() -> str:
    """Return the instructions for picking lanes by number: avx512, avx2 or none."""
    has = features()
    return "avx512" if "avx512f" in has else "avx2" if "avx2" in has else ""


def table_lookup(b: Any, isa: str, base: Any, index: Any, tables: int) -> Any:
    """Return sixteen numbers, each at base + 4 * index below 16 * tables."""
    if isa == "avx512":
        return _select_table(b, base, index, tables, lambda x: _permute(b, isa, x, index))
    if isa == "avx2":
        halves = [
            _select_table(b, base, half, tables, partial(_lookup_16, b, index=half))
            for half in (_half_lanes(b, index, side) for side in (0, 1))
        ]
        return b.shuffle_vector(*halves, ir.Constant(VI, list(range(WIDTH))))
    return gather_f32(b, base, index)


def _select_table(b: Any, base: Any, index: Any, tables: int, pick: Any) -> Any:
    """Return what `pick` takes of the table of sixteen that each index is in."""
    numbers = None
    for k in range(tables):
        part = pick(add_bytes(b, base, 64 * k))
        if numbers is not None:
            part = b.select(
                b.icmp_signed(">=", index, constant(WIDTH * k, index.type)), part, numbers
            )
        numbers = part
    return numbers


def _permute(b: Any, isa: str, where: Any, index: Any) -> Any:
    """Return lanes of the numbers at an address; of an index the low bits count."""
    name = {"avx512": "llvm.x86.avx512.permvar.sf.512", "avx2": "llvm.x86.avx2.permps"}[isa]
    kind = ir.VectorType(F32, index.type.count)
    fn = b.module.declare_intrinsic(name, (), ir.FunctionType(kind, [kind, index.type]))
    return b.call(fn, [read(b, where, kind), index])


def _half_lanes(b: Any, index: Any, side: int) -> Any:
    lanes = ir.Constant(ir.VectorType(I32, 8), list(range(8 * side, 8 * side + 8)))
    return b.shuffle_vector(index, ir.Constant(VI, ir.Undefined), lanes)


def _lookup_16(b: Any, where: Any, index: Any) -> Any:
    """Return those of sixteen numbers in two registers that an index of eight lanes names."""
    low, high = (_permute(b, "avx2", add_bytes(b, where, 32 * i), index) for i in (0, 1))
    upper = b.icmp_signed("!=", b.and_(index, constant(8, index.type)), constant(0, index.type))
    return b.select(upper, high, low)
