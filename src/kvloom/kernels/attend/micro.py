"""The inner loops of decode attention as LLVM instructions, made for one format.

Decides how codes become numbers in registers and how they meet queries and weights; which tokens,
in what order and what happens between scores and values is `cpu`'s.

A code c of b bits is placed on top of the mantissa of 1.0: x = 1 + c / 2^b, by a shift, an and and
an or, with no conversion. Value = c * scale + zero = x * S + Z with S = 2^b * scale, Z = zero - S.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..lanes import I32, I64, VF, VI, WIDTH, at, fused, read, read_f32, same, spread, summed, write
from ..quant.ref import ATOM

SIZE = {0: 4, 1: 2, 2: 2, 3: 1}  # bytes of lanes.FP32, FP16, BF16, FP8
_ONE = 0x3F800000


def _codes(b: Any, rows: list[Any], bits: int) -> list[Any]:
    """x of the tokens of an atom, from its byte rows."""
    numbers = [b.zext(read(b, row, ir.VectorType(ir.IntType(8), WIDTH), 1), VI) for row in rows]

    def part(row: int, low: int, count: int, to: int) -> Any:
        """`count` bits of a byte row from bit `low`, moved up to bit `to`."""
        moved = b.shl(numbers[row], same(to - low, VI))
        return b.and_(moved, same(((1 << count) - 1) << to, VI))

    found = []
    for t in range(ATOM[bits][0]):
        if bits == 3:
            code = b.or_(part(t // 4, t % 4 * 2, 2, 20), part(2, t, 1, 22))
        else:
            code = part(0, t * bits, bits, 23 - bits)
        found.append(b.bitcast(b.or_(code, same(_ONE, VI)), VF))
    return found


def _tokens(b: Any, base: Any, stride: Any, atoms: int, v: int, bits: int, kind: int) -> list[Any]:
    """Channels 16v to 16v + 15 of the tokens of some atoms: x where packed, else the numbers."""
    if not bits:
        rows = [b.add(base, b.mul(stride, ir.Constant(I64, i))) for i in range(atoms)]
        return [read_f32(b, at(b, row, v * WIDTH * SIZE[kind]), kind) for row in rows]
    height = ATOM[bits][1]
    rows = [b.add(base, b.mul(stride, ir.Constant(I64, i))) for i in range(atoms * height)]
    rows = [at(b, row, v * WIDTH) for row in rows]
    return [x for i in range(atoms) for x in _codes(b, rows[i * height : (i + 1) * height], bits)]


def _one(b: Any, address: Any) -> Any:
    return spread(b, read(b, address, ir.FloatType()))


def _sixteen_sums(b: Any, vectors: list[Any]) -> Any:
    """Lane i: the sum of the lanes of vector i. Four rounds halve how many lanes a sum takes."""
    half = WIDTH // 2
    while half:
        # of every vector's runs of 2 * half lanes, the first and the second halves
        low = [j for j in range(2 * WIDTH) if j // half % 2 == 0]
        high = [j + half for j in low]
        picks = [ir.Constant(VI, low), ir.Constant(VI, high)]
        vectors = [
            b.fadd(*(b.shuffle_vector(x, y, pick) for pick in picks))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        half //= 2
    return vectors[0]


@intrinsic(prefer_literal=True)
def scores(
    ctx: Any,
    q: Any,
    start: Any,
    base: Any,
    stride: Any,
    s: Any,
    s_stride: Any,
    meta: Any,
    meta_gap: Any,
    d: Any,
    w: Any,
    atoms: Any,
    bits: Any,
    kind: Any,
    group: Any,
) -> Any:
    """Write the products of w queries and the tokens of some atoms to s.

    q: fp32 [w, d]. start: fp32 [w, 16], what each sum begins with, spread over lanes. base, stride:
    the first byte row, and from one to the next. group: channels that share a scale, S at
    meta [tokens, d / group] and Z meta_gap bytes behind; 0 where no scale is to be applied here.
    """
    n_d, n_w, n_atoms = d.literal_value, w.literal_value, atoms.literal_value
    n_bits, fmt, n_group = bits.literal_value, kind.literal_value, group.literal_value
    n_tokens = n_atoms * (ATOM[n_bits][0] if n_bits else 1)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        q, start, base, stride, s, s_stride, meta, gap = args[:8]
        begin = [read(b, at(b, start, 64 * row), VF) for row in range(n_w)]
        acc = [[begin[row]] * n_tokens for row in range(n_w)]
        for v in range(n_d // WIDTH):
            xs = _tokens(b, base, stride, n_atoms, v, n_bits, fmt)
            if n_group:
                for t in range(n_tokens):
                    big = at(b, meta, 4 * (t * (n_d // n_group) + v * WIDTH // n_group))
                    xs[t] = fused(b, xs[t], _one(b, big), _one(b, b.add(big, gap)))
            for row in range(n_w):
                qv = read(b, at(b, q, 4 * (row * n_d + v * WIDTH)), VF)
                acc[row] = [fused(b, x, qv, a) for x, a in zip(xs, acc[row], strict=True)]
        to = [b.add(s, b.mul(s_stride, ir.Constant(I64, row))) for row in range(n_w)]
        if n_w * n_tokens % WIDTH:
            for row in range(n_w):
                for t in range(n_tokens):
                    write(b, at(b, to[row], 4 * t), summed(b, acc[row][t]))
            return context.get_dummy_value()
        flat = [x for row in acc for x in row]
        run = min(n_tokens, WIDTH)
        for i in range(0, len(flat), WIDTH):
            found = _sixteen_sums(b, flat[i : i + WIDTH])
            for j in range(0, WIDTH, run):
                row, t = divmod(i + j, n_tokens)
                pick = ir.Constant(ir.VectorType(I32, run), list(range(j, j + run)))
                part = b.shuffle_vector(found, ir.Constant(VF, ir.Undefined), pick)
                write(b, at(b, to[row], 4 * t), part)
        return context.get_dummy_value()

    ints = [types.int64] * 8
    return types.void(*ints, d, w, atoms, bits, kind, group), codegen


def chunks(vectors: int, w: int) -> list[tuple[int, int]]:
    """Cut a row of `vectors` vectors so that w rows of accumulators fit in 16 registers."""
    parts = -(-vectors * w // 16)
    edges = [vectors * i // parts for i in range(parts + 1)]
    return list(pairwise(edges))


@intrinsic(prefer_literal=True)
def values(
    ctx: Any,
    p: Any,
    p_stride: Any,
    base: Any,
    stride: Any,
    count: Any,
    out: Any,
    meta: Any,
    meta_gap: Any,
    d: Any,
    w: Any,
    bits: Any,
    kind: Any,
    group: Any,
) -> Any:
    """Add the values of `count` atoms, times w rows of weights p, to out fp32 [w, d].

    group: as in `scores`; -1 where S and Z [d] hold for all the tokens (groups along tokens).
    """
    n_d, n_w, n_bits = d.literal_value, w.literal_value, bits.literal_value
    fmt, n_group = kind.literal_value, group.literal_value
    per, height = ATOM[n_bits] if n_bits else (1, 1)

    def codegen(context: Any, b: Any, sig: Any, args: Any) -> Any:
        p, p_stride, base, stride, count, out, meta, gap = args[:8]
        to = [b.add(p, b.mul(p_stride, ir.Constant(I64, row))) for row in range(n_w)]
        step = b.mul(stride, ir.Constant(I64, height))
        for lo, hi in chunks(n_d // WIDTH, n_w):
            cells = [(row, v) for row in range(n_w) for v in range(lo, hi)]
            where = {cell: at(b, out, 4 * (cell[0] * n_d + cell[1] * WIDTH)) for cell in cells}
            begin = {cell: read(b, where[cell], VF) for cell in cells}
            big, off = {}, {}
            if n_group == -1:
                for v in range(lo, hi):
                    big[v] = read(b, at(b, meta, 64 * v), VF)
                    off[v] = read(b, b.add(at(b, meta, 64 * v), gap), VF)
            before = b.block
            loop, body, after = (b.append_basic_block(n) for n in ("loop", "body", "after"))
            b.branch(loop)
            b.position_at_end(loop)
            i, here = b.phi(I64), b.phi(I64)
            acc = {cell: b.phi(VF) for cell in cells}
            i.add_incoming(ir.Constant(I64, 0), before)
            here.add_incoming(base, before)
            for cell in cells:
                acc[cell].add_incoming(begin[cell], before)
            b.cbranch(b.icmp_signed("<", i, count), body, after)
            b.position_at_end(body)
            new = dict(acc)
            token = b.mul(i, ir.Constant(I64, 4 * per))
            weights = [
                [_one(b, at(b, b.add(to[row], token), 4 * t)) for t in range(per)]
                for row in range(n_w)
            ]
            for v in range(lo, hi):
                xs = _tokens(b, here, stride, 1, v, n_bits, fmt)
                for t in range(per):
                    x = xs[t]
                    if n_group == -1:
                        x = fused(b, x, big[v], off[v])
                    elif n_group:
                        across = n_d // n_group
                        place = b.add(meta, b.mul(token, ir.Constant(I64, across)))
                        place = at(b, place, 4 * (t * across + v * WIDTH // n_group))
                        x = fused(b, x, _one(b, place), _one(b, b.add(place, gap)))
                    for row in range(n_w):
                        new[row, v] = fused(b, x, weights[row][t], new[row, v])
            i.add_incoming(b.add(i, ir.Constant(I64, 1)), b.block)
            here.add_incoming(b.add(here, step), b.block)
            for cell in cells:
                acc[cell].add_incoming(new[cell], b.block)
            b.branch(loop)
            b.position_at_end(after)
            for cell in cells:
                write(b, where[cell], acc[cell])
        return context.get_dummy_value()

    ints = [types.int64] * 8
    return types.void(*ints, d, w, bits, kind, group), codegen
