"""The inner loops of decode attention as LLVM instructions, made for one format.

Decides how numbers in registers are multiplied with queries and weights. `dequant` makes numbers of
codes; `decode_kernel` decides which tokens are read, in which order, and what happens between
scores and values.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...simd import (
    I32,
    I64,
    VF,
    VI,
    WIDTH,
    add_bytes,
    constant,
    load_barrier,
    loop,
    lowered,
    muladd,
    read,
    reduce_add,
    write,
)
from . import lookup
from .dequant import Meta, lane_isa, load_broadcast, tokens
from .variant import CHANNEL, MAP, NONE, TABLE, SideConstants, from_literal


def _sixteen_sums(b: Any, vectors: list[Any]) -> Any:
    """Return in lane i the sum of vector i. Four rounds halve how many lanes a sum takes."""
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


def rotary_pairs(d: int, rope_dims: int, interleaved: bool) -> list[int]:
    """Return the channel that rotates with each channel; itself where it does not rotate."""
    half = rope_dims // 2

    def pair(c: int) -> int:
        if c >= rope_dims:
            return c
        return c ^ 1 if interleaved else (c + half) % rope_dims

    return [pair(c) for c in range(d)]


@cache
def rotation_groups(d: int, constants: SideConstants) -> list[list[int]]:
    """Return vectors of a token that are needed together: those that hold each other's pairs."""
    of = list(range(d // WIDTH))
    for c, pair in enumerate(rotary_pairs(d, constants.rope_dims, bool(constants.interleaved))):
        a, b = of[c // WIDTH], of[pair // WIDTH]
        of = [min(a, b) if x in (a, b) else x for x in of]
    return [[v for v, its in enumerate(of) if its == first] for first in sorted(set(of))]


def _place(v: int, constants: SideConstants) -> int:
    """Return where a row has a vector's cosines: of two that are a pair, the first's."""
    whole = not constants.interleaved and constants.rope_dims % (2 * WIDTH) == 0
    second = whole and constants.rope_dims // 2 <= WIDTH * v < constants.rope_dims
    return 64 * v - (2 * constants.rope_dims if second else 0)


def apply_rope(
    b: Any, xs: dict[int, Any], row: Any, d: int, constants: SideConstants, back: bool
) -> dict[int, Any]:
    """Rotate vectors of a token by a row of cosines and sines [2, d], or back."""
    pairs, turned = rotary_pairs(d, constants.rope_dims, bool(constants.interleaved)), {}
    for v, x in xs.items():
        pairs_of_v = pairs[WIDTH * v : WIDTH * (v + 1)]
        partner = None
        for source in sorted({c // WIDTH for c in pairs_of_v}):
            # lanes of this source, and of what is there already
            base = xs[source] if partner is None else partner
            mask = [
                c % WIDTH + (0 if partner is None else WIDTH) if c // WIDTH == source else i
                for i, c in enumerate(pairs_of_v)
            ]
            partner = b.shuffle_vector(base, xs[source], ir.Constant(VI, mask))
        place = _place(v, constants)
        second = place < 64 * v
        cos, sin = (read(b, add_bytes(b, row, place + skip), VF) for skip in (0, 4 * d))
        sin = b.fneg(sin) if back != second else sin
        turned[v] = muladd(b, partner, sin, b.fmul(x, cos))
    return turned


RUNS = 8  # tokens for which a query is rotated from two of them


def _chain(
    b: Any, q: dict[int, Any], rope: Any, lo: int, hi: int, d: int, constants: SideConstants
) -> dict[int, dict[int, Any]]:
    """Rotate vectors of a query back by lo .. hi - 1: two by table, the others from those.

    q(j + 1) = 2 cos(w) q(j) - q(j - 1), of which errors grow: so three steps up and three down.
    """
    queries: dict[int, dict[int, Any]] = {j: {} for j in range(lo, hi)}
    middle = (lo + hi) // 2
    for j in (middle - 1, middle):
        queries[j] = apply_rope(b, q, add_bytes(b, rope, 8 * j * d), d, constants, back=True)
    for v in q:
        cos = read(b, add_bytes(b, rope, 8 * d + _place(v, constants)), VF)
        twice = b.fadd(cos, cos)
        for j in range(middle + 1, hi):
            queries[j][v] = muladd(b, twice, queries[j - 1][v], b.fneg(queries[j - 2][v]))
        for j in range(middle - 2, lo - 1, -1):
            queries[j][v] = muladd(b, twice, queries[j + 1][v], b.fneg(queries[j + 2][v]))
    return queries


@intrinsic(prefer_literal=True)
def rotate_queries(ctx: Any, q: Any, out: Any, row: Any, d: Any, w: Any, literal: Any) -> Any:
    """Write w queries fp32 [w, d], rotated back by a row of cosines and sines, to out."""
    n_d, n_w, constants = d.literal_value, w.literal_value, from_literal(literal.literal_value)

    def emit(b: Any, q: Any, out: Any, row: Any, *_: Any) -> None:
        for i in range(n_w):
            for vs in rotation_groups(n_d, constants):
                xs = {v: read(b, add_bytes(b, q, 4 * i * n_d + 64 * v), VF) for v in vs}
                for v, x in apply_rope(b, xs, row, n_d, constants, back=True).items():
                    write(b, add_bytes(b, out, 4 * i * n_d + 64 * v), x)

    return lowered(types.void(*[types.int64] * 3, d, w, literal), emit)


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
    z_offset: Any,
    table: Any,
    rope: Any,
    d: Any,
    w: Any,
    blocks: Any,
    literal: Any,
) -> Any:
    """Write the products of w queries and the tokens of some pack blocks to s.

    q: fp32 [w, d]. start: fp32 [w, 16], what each sum begins with, spread over lanes. base, stride:
    the first byte row, and from one to the next. meta, z_offset, table: see `dequant.Meta`. rope:
    cosines and sines fp32 [tokens, 2, d] for keys packed before RoPE.
    """
    n_d, n_w, n_blocks = d.literal_value, w.literal_value, blocks.literal_value
    constants = from_literal(literal.literal_value)
    per = constants.per_block[0]
    n_tokens = n_blocks * per

    def emit(b: Any, *args: Any) -> None:
        q, start, base, stride, s, s_stride, meta, z_offset, table, rope = args[:10]
        scales = Meta(meta, z_offset, table, lane_isa())
        begin = [read(b, add_bytes(b, start, 64 * row), VF) for row in range(n_w)]
        acc = [[begin[row]] * n_tokens for row in range(n_w)]
        step = b.mul(stride, ir.Constant(I64, constants.per_block[1]))
        chained = constants.rope_dims and n_w == 1 and n_tokens >= WIDTH - 1
        for vs in rotation_groups(n_d, constants):
            qs = {
                v: [read(b, add_bytes(b, q, 4 * (row * n_d + v * WIDTH)), VF) for row in range(n_w)]
                for v in vs
            }
            for i in range(n_blocks):  # a pack block at a time: its numbers need registers
                place = b.add(base, b.mul(step, ir.Constant(I64, i)))
                if constants.by == TABLE:
                    xs = {v: lookup.indices(b, place, v, constants, table) for v in vs}
                else:
                    xs = {v: tokens(b, place, stride, v, constants) for v in vs}
                for t in range(i * per, (i + 1) * per):
                    if chained and t % RUNS == 0:
                        first = {v: qs[v][0] for v in vs}
                        chain = _chain(b, first, rope, t, min(t + RUNS, n_tokens), n_d, constants)
                    if constants.by == TABLE:
                        both = lookup.stored(b, add_bytes(b, meta, lookup.SIZE * t))
                        x = {v: lookup.looked_up(b, both, xs[v][t - i * per]) for v in vs}
                    else:
                        x = {
                            v: scales.scaled(b, xs[v][t - i * per], t, v, n_d, constants)
                            for v in vs
                        }
                    if constants.rope_dims and not chained:
                        angles = add_bytes(b, rope, 8 * t * n_d)
                        x = apply_rope(b, x, angles, n_d, constants, back=False)
                    for v, row in itertools.product(vs, range(n_w)):
                        y = chain[t][v] if chained else qs[v][row]
                        acc[row][t] = muladd(b, x[v], y, acc[row][t])
                if constants.by in (MAP, TABLE) or constants.rope_dims:
                    load_barrier(b)
        rows = [b.add(s, b.mul(s_stride, ir.Constant(I64, row))) for row in range(n_w)]
        _write_sums(b, [x for row in acc for x in row], rows)

    return lowered(types.void(*[types.int64] * 10, d, w, blocks, literal), emit)


def _write_sums(b: Any, vectors: list[Any], out: list[Any]) -> None:
    """Write the sums of the lanes of vectors, as many to each address, side by side."""
    per_address = len(vectors) // len(out)
    whole = len(vectors) % WIDTH == 0
    run = min(per_address, WIDTH)
    for i in range(0, len(vectors), WIDTH):
        chunk = vectors[i : i + WIDTH]
        if len(chunk) < WIDTH // 2:
            for j, x in enumerate(chunk, i):
                target = add_bytes(b, out[j // per_address], 4 * (j % per_address))
                write(b, target, reduce_add(b, x))
            continue
        sums = _sixteen_sums(b, chunk + [constant(0.0)] * (WIDTH - len(chunk)))
        if not whole:
            for j in range(len(chunk)):
                x = b.extract_element(sums, ir.Constant(I32, j))
                write(b, add_bytes(b, out[(i + j) // per_address], 4 * ((i + j) % per_address)), x)
            continue
        for j in range(0, WIDTH, run):
            row, t = divmod(i + j, per_address)
            pick = ir.Constant(ir.VectorType(I32, run), list(range(j, j + run)))
            part = b.shuffle_vector(sums, ir.Constant(VF, ir.Undefined), pick)
            write(b, add_bytes(b, out[row], 4 * t), part)


def chunks(vectors: int, w: int) -> list[tuple[int, int]]:
    """Cut a row of `vectors` vectors so that w rows of accumulators fit in 16 registers."""
    parts = -(-vectors * w // 16)
    edges = [vectors * i // parts for i in range(parts + 1)]
    return list(itertools.pairwise(edges))


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
    z_offset: Any,
    table: Any,
    d: Any,
    w: Any,
    literal: Any,
) -> Any:
    """Add the values of `count` pack blocks, times w rows of weights p, to out fp32 [w, d].

    meta, z_offset, table: see `dequant.Meta`.
    """
    n_d, n_w, constants = d.literal_value, w.literal_value, from_literal(literal.literal_value)

    def emit(b: Any, *args: Any) -> None:
        for lo, hi in chunks(n_d // WIDTH, n_w):
            _sum_chunk(b, args[:9], lo, hi, n_d, n_w, constants)

    return lowered(types.void(*[types.int64] * 9, d, w, literal), emit)


def _sum_chunk(
    b: Any, args: tuple[Any, ...], lo: int, hi: int, d: int, w: int, constants: SideConstants
) -> None:
    """Do what `values` does for vectors lo to hi of the channels."""
    p, p_stride, base, stride, count, out, meta, z_offset, table = args
    per, height = constants.per_block
    rows = [b.add(p, b.mul(p_stride, ir.Constant(I64, row))) for row in range(w)]
    cells = [row * d + v * WIDTH for row in range(w) for v in range(lo, hi)]
    where = [add_bytes(b, out, 4 * cell) for cell in cells]
    channels = {}
    for v in range(lo, hi) if constants.by == CHANNEL else ():
        scale = add_bytes(b, meta, 64 * v)
        channels[v] = read(b, scale, VF), read(b, b.add(scale, z_offset), VF)
    step = b.mul(stride, ir.Constant(I64, height))

    def add(i: Any, state: list[Any]) -> list[Any]:
        block_address, *sums = state
        token = b.mul(i, ir.Constant(I64, 4 * per))
        starts = [b.add(row, token) for row in rows]
        weights = [[load_broadcast(b, add_bytes(b, x, 4 * t)) for t in range(per)] for x in starts]
        meta_address = meta
        if constants.by not in (NONE, CHANNEL):
            meta_address = b.add(meta, b.mul(token, ir.Constant(I64, constants.across)))
        scales, tables = Meta(meta_address, z_offset, table, lane_isa()), []
        if constants.by == TABLE:
            tables = [
                lookup.table(b, add_bytes(b, meta_address, 4 * t * constants.across), z_offset)
                for t in range(per)
            ]
        for v in range(lo, hi):
            if constants.by == TABLE:
                xs = lookup.indices(b, block_address, v, constants, table)
            else:
                xs = tokens(b, block_address, stride, v, constants)
            for t in range(per):
                if constants.by == TABLE:
                    x = lookup.looked_up(b, tables[t], xs[t])
                elif constants.by == CHANNEL:
                    x = muladd(b, xs[t], *channels[v])
                else:
                    x = scales.scaled(b, xs[t], t, v, d, constants)
                for row in range(w):
                    cell = row * (hi - lo) + v - lo
                    sums[cell] = muladd(b, x, weights[row][t], sums[cell])
            if constants.by in (MAP, TABLE):
                load_barrier(b)
        return [b.add(block_address, step), *sums]

    _, *sums = loop(b, count, [base, *(read(b, address, VF) for address in where)], add)
    for address, x in zip(where, sums, strict=True):
        write(b, address, x)
