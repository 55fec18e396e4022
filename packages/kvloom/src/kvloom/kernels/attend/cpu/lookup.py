"""Dequantization by table, for few groups and codes: one instruction per vector of a token.

Of up to `GROUPS` groups and 4 codes a token has at most 32 numbers, code * scale + zero, which two
registers hold. Number 16h + 4c + l is code c's in group 4h + l, so a table is made of scales and
zeros by broadcasts. The codes of one register, four bytes per lane, are combined with their group
indices in one operation. Needs AVX-512. Decides nothing about which tokens are read.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...simd import (
    F32,
    I64,
    VF,
    VI,
    WIDTH,
    add_bytes,
    call,
    constant,
    features,
    loop,
    lowered,
    muladd,
    read,
    write,
)
from .variant import MAP, TABLE, SideConstants, from_literal

GROUPS = 8
SIZE = 128  # bytes of a token's table
_BYTES = ir.VectorType(ir.IntType(8), 4 * WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), 2 * WIDTH)
_CODE = 0b01100  # where an index has its code
# 2 bit: tokens 0 .. 3 are read from bytes 1, 0, 3, 2 of a lane; where their indices begin
_BEGINS = (6, 0, 26, 20)


def by_table(constants: SideConstants) -> SideConstants:
    """Return the same constants, by table if its numbers are few and the CPU has AVX-512."""
    few = constants.by == MAP and constants.across <= GROUPS and constants.bits in (1.5, 2)
    fits = few and {"avx512f", "avx512bw"} <= features()
    return constants._replace(by=TABLE) if fits else constants


def _begins(constants: SideConstants) -> tuple[int, ...]:
    return _BEGINS if constants.bits == 2 else (0, 16)


@intrinsic(prefer_literal=True)
def scatter_table(ctx: Any, table: Any, out: Any, d: Any, literal: Any) -> Any:
    """From each channel's group, int32 [d], write what is joined to its codes."""
    n_d, constants = d.literal_value, from_literal(literal.literal_value)

    def emit(b: Any, table: Any, out: Any, *_: Any) -> None:
        for v in range(0, n_d, WIDTH):
            group = read(b, add_bytes(b, table, 4 * v), VI)
            low, high = b.and_(group, constant(3, VI)), b.and_(group, constant(4, VI))
            group = b.or_(low, b.shl(high, constant(2, VI)))
            places = constant(0, VI)
            for begin in _begins(constants):
                places = b.or_(places, b.shl(group, constant(begin, VI)))
            write(b, add_bytes(b, out, 4 * v), places)

    return lowered(types.void(types.int64, types.int64, d, literal), emit)


def indices(b: Any, base: Any, v: int, constants: SideConstants, placed: Any) -> list[Any]:
    """Return where the numbers of channels 16v to 16v + 15 are, of each token of a pack block."""
    groups = read(b, add_bytes(b, placed, 64 * v), VI)
    byte = read(b, add_bytes(b, base, v * WIDTH), ir.VectorType(ir.IntType(8), WIDTH), 1)
    four = [i // 4 for i in range(4 * WIDTH)]
    pick = ir.Constant(ir.VectorType(ir.IntType(32), len(four)), four)
    lanes = b.bitcast(b.shuffle_vector(byte, ir.Constant(byte.type, ir.Undefined), pick), VI)

    def joined(x: Any) -> list[Any]:
        mask = sum(_CODE << begin for begin in _begins(constants))
        x = b.or_(b.and_(x, constant(mask, VI)), groups)
        return [b.lshr(x, constant(begin, VI)) if begin else x for begin in _begins(constants)]

    return joined(lanes) if constants.bits == 2 else _digits(b, lanes, joined)


def _digits(b: Any, lanes: Any, joined: Any) -> list[Any]:
    """Return five digits of a number below 3^5, two at a time: see `dequant`; in halves of 16 bits.

    What is left of byte * 270 / 2^16 behind k digits is byte * 270 * 3^k, less whole numbers; a
    half has its byte twice, that is byte * 257.
    """
    joined_tokens, inverse = [], pow(257, -1, 1 << 16)
    for k in (0, 2, 4):
        factors = [270 * 3 ** (k + i) * inverse % (1 << 16) for i in (0, 1)]
        rest = b.mul(b.bitcast(lanes, _HALVES), ir.Constant(_HALVES, factors * WIDTH))
        name = "llvm.x86.avx512.pmulhu.w.512"
        four = call(b, name, _HALVES, rest, constant(12, _HALVES))  # 4 * digit, and a fraction
        joined_tokens += joined(b.bitcast(four, VI))
    return joined_tokens[4::-1]


def table(b: Any, meta: Any, z_offset: Any) -> tuple[Any, Any]:
    """Return a token's table, from the address of its scales; zeros are `z_offset` bytes after."""
    quarter = ir.VectorType(F32, 4)
    codes = ir.Constant(VF, [float(i // 4) for i in range(WIDTH)])
    pick = ir.Constant(VI, [i % 4 for i in range(WIDTH)])
    tables = []
    for skip in (0, 16):
        four = (read(b, add_bytes(b, x, skip), quarter) for x in (meta, b.add(meta, z_offset)))
        scale, zero = (b.shuffle_vector(x, ir.Constant(quarter, ir.Undefined), pick) for x in four)
        tables.append(muladd(b, codes, scale, zero))
    return tables[0], tables[1]


@intrinsic(prefer_literal=True)
def tabled(ctx: Any, meta: Any, z_offset: Any, count: Any, out: Any, literal: Any) -> Any:
    """Write the tables of `count` tokens, whose scales and zeros are as for `table`."""
    constants = from_literal(literal.literal_value)

    def emit(b: Any, meta: Any, z_offset: Any, count: Any, out: Any, _: Any) -> None:
        def body(i: Any, _: list[Any]) -> list[Any]:
            source = b.add(meta, b.mul(i, ir.Constant(I64, 4 * constants.across)))
            target = b.add(out, b.mul(i, ir.Constant(I64, SIZE)))
            for j, x in enumerate(table(b, source, z_offset)):
                write(b, add_bytes(b, target, 64 * j), x)
            return []

        loop(b, count, [], body)

    return lowered(types.void(*[types.int64] * 4, literal), emit)


def stored(b: Any, where: Any) -> tuple[Any, Any]:
    """Return a table that `tabled` wrote."""
    return read(b, where, VF), read(b, add_bytes(b, where, 64), VF)


def looked_up(b: Any, table: tuple[Any, Any], index: Any) -> Any:
    """Return the numbers of a table at these indices, of which the low five bits count."""
    return call(b, "llvm.x86.avx512.vpermi2var.ps.512", VF, table[0], index, table[1])
