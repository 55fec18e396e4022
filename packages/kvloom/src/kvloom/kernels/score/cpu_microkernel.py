"""The inner loops of scoring: tiles of products, logarithms, and noise from counters.

Decides instructions; what is summed over which rows is `cpu_kernel`'s. Lanes are those of
`kernels.simd`. Importing this imports Numba.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..cpu_runtime import kernel_step
from ..simd import (
    F32,
    I32,
    I64,
    LN2_HIGH,
    LN2_LOW,
    VF,
    VI,
    WIDTH,
    Lanes,
    add_bytes,
    assembly,
    broadcast,
    call,
    constant,
    features,
    loop,
    lowered,
    muladd,
    muladd_pairs,
    read,
    write,
)
from .arguments import PAIRS, TILES
from .noise import M1, M2, TOP, C

# Query rows and vectors of keys whose products fill the registers: with AVX-512, 24 of 32; where a
# vector takes two registers (AVX2) or four (NEON), 12 of 16 or 24 of 32.
AT_ONCE = (12, 2) if "avx512f" in features() else (6, 1)
TILES_AT_ONCE = (32, 2)  # the same for tiles

# log(1 + f) = f - f^2 / 2 + f^3 * polynomial, on sqrt(1/2) <= 1 + f < sqrt(2) (Cephes)
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
# erfinv(x) = x * polynomial of w = -log(1 - x^2): of w - 2.5 below 5, of sqrt(w) - 3 above
# (Giles, Approximating the erfinv function, 2011)
_NEAR = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503,
    -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_FAR = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
    0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


@intrinsic(prefer_literal=True)
def products(
    ctx: Any, q: Any, k: Any, out: Any, stride: Any, d: Any, rows: Any, vectors: Any, unit: Any
) -> Any:
    """Write the products of some queries, fp32 [d, rows], and a panel of keys to out.

    k: fp32 [d, 16 * vectors]. out: fp32 rows, `stride` bytes apart. rows, vectors and unit are
    constants. unit: PAIRS: a number of q and of k is a pair of bf16 numbers. TILES: the same, d is
    a multiple of 16, the queries are [rows, d], and `begin_tiles` has run.
    """
    n_rows, n_vectors = rows.literal_value, vectors.literal_value
    typed = types.void(*[types.int64] * 5, rows, vectors, unit)
    if unit.literal_value == TILES:
        return lowered(typed, _tile_products)
    add_product = muladd_pairs if unit.literal_value == PAIRS else muladd

    def emit(b: Any, q: Any, k: Any, out: Any, stride: Any, d: Any, *_: Any) -> None:
        def add(i: Any, sums: list[Any]) -> list[Any]:
            source = b.add(k, b.mul(i, ir.Constant(I64, 64 * n_vectors)))
            keys = [read(b, add_bytes(b, source, 64 * v), VF) for v in range(n_vectors)]
            source = b.add(q, b.mul(i, ir.Constant(I64, 4 * n_rows)))
            totals = []
            for row in range(n_rows):  # one broadcast at a time: sums take most registers
                x = broadcast(b, read(b, add_bytes(b, source, 4 * row), F32))
                row_sums = sums[row * n_vectors : (row + 1) * n_vectors]
                totals += [add_product(b, x, key, y) for key, y in zip(keys, row_sums, strict=True)]
            return totals

        sums = loop(b, d, [constant(0.0)] * (n_rows * n_vectors), add)
        for i, total in enumerate(sums):
            row, v = divmod(i, n_vectors)
            target = b.add(out, b.mul(stride, ir.Constant(I64, row)))
            write(b, add_bytes(b, target, 64 * v), total)

    return lowered(typed, emit)


def _tile_products(b: Any, q: Any, k: Any, out: Any, stride: Any, d: Any, *_: Any) -> None:
    """Emit `products` of 32 queries and 32 keys."""
    for tile in range(4):
        assembly(b, f"tilezero %tmm{tile}")
    _multiply_tiles(b, q, b.shl(d, ir.Constant(I64, 2)), k, out, stride, d)


def add_tile_products(b: Any, q: Any, row_step: Any, k: Any, out: Any, stride: Any, d: Any) -> None:
    """Emit `products` of 32 queries, `row_step` bytes apart, and 32 keys, that are added to out."""
    for tile, target in _of_tiles(b, out, stride):
        assembly(b, f"tileloadd ($0,$1), %tmm{tile}", target, stride)
    _multiply_tiles(b, q, row_step, k, out, stride, d)


def _of_tiles(b: Any, out: Any, stride: Any) -> list[tuple[int, Any]]:
    """Return the number and the address in out of the tiles of 32 rows and 32 keys."""
    below = b.add(out, b.shl(stride, ir.Constant(I64, 4)))
    return [(i, add_bytes(b, below if i // 2 else out, 64 * (i % 2))) for i in range(4)]


def _multiply_tiles(b: Any, q: Any, row_step: Any, k: Any, out: Any, stride: Any, d: Any) -> None:
    """Add products of tiles 4, 5 and 6, 7 to tiles 0 to 3, and write these to out."""
    key_step = ir.Constant(I64, 128)

    def add(i: Any, _: list[Any]) -> list[Any]:
        queries = b.add(q, b.shl(i, ir.Constant(I64, 6)))
        keys = b.add(k, b.shl(i, ir.Constant(I64, 11)))
        below = b.add(queries, b.shl(row_step, ir.Constant(I64, 4)))
        assembly(b, "tileloadd ($0,$1), %tmm4", queries, row_step)
        assembly(b, "tileloadd ($0,$1), %tmm6", keys, key_step)
        assembly(b, "tileloadd ($0,$1), %tmm7", add_bytes(b, keys, 64), key_step)
        assembly(b, "tileloadd ($0,$1), %tmm5", below, row_step)
        for tile in range(4):
            assembly(b, f"tdpbf16ps %tmm{6 + tile % 2}, %tmm{4 + tile // 2}, %tmm{tile}")
        return []

    loop(b, b.lshr(d, ir.Constant(I64, 4)), [], add)
    for tile, target in _of_tiles(b, out, stride):
        assembly(b, f"tilestored %tmm{tile}, ($0,$1)", target, stride)


@intrinsic(prefer_literal=True)
def begin_tiles(ctx: Any, unit: Any) -> Any:
    """Make all tiles 16 rows of 64 bytes, if the unit, a constant, is TILES."""

    def emit(b: Any, _: Any) -> None:
        if unit.literal_value == TILES:
            kind = ir.ArrayType(ir.IntType(8), 64)
            memory = b.alloca(kind)
            numbers = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]
            b.store(ir.Constant(kind, numbers), memory)
            assembly(b, "ldtilecfg ($0)", b.ptrtoint(memory, I64))

    return lowered(types.void(unit), emit)


@intrinsic(prefer_literal=True)
def end_tiles(ctx: Any, unit: Any) -> Any:
    """Undo `begin_tiles`."""

    def emit(b: Any, _: Any) -> None:
        if unit.literal_value == TILES:
            assembly(b, "tilerelease")

    return lowered(types.void(unit), emit)


@intrinsic
def mask_not_below(ctx: Any, x: Any, address: Any, end: Any) -> Any:
    """Return x where the sixteen int32 at address are below `end`, else inf."""

    def emit(b: Any, x: Any, address: Any, end: Any) -> Any:
        below = b.icmp_signed("<", read(b, address, VI), broadcast(b, b.trunc(end, I32)))
        return b.select(below, x, constant(float("inf")))

    return lowered(Lanes(Lanes, types.int64, types.int64), emit)


@intrinsic
def find_lane(ctx: Any, x: Any, wanted: Any) -> Any:
    """Return the number of the first lane of x that holds `wanted`, 16 if none does."""

    def emit(b: Any, x: Any, wanted: Any) -> Any:
        lane = ir.Constant(VI, list(range(WIDTH)))
        match = b.select(b.fcmp_ordered("==", x, broadcast(b, wanted)), lane, constant(WIDTH, VI))
        return b.sext(call(b, "llvm.vector.reduce.smin.v16i32", I32, match), I64)

    return lowered(types.int64(Lanes, types.float32), emit)


def _log(b: Any, x: Any) -> Any:
    """Return the logarithm of normal numbers above 0."""
    word = b.bitcast(x, VI)
    # so that the rest of x lies between sqrt(1/2) and sqrt(2)
    shifted = b.sub(word, constant(0x3F3504F3, VI))
    power = b.ashr(shifted, constant(23, VI))
    f = b.bitcast(b.sub(word, b.shl(power, constant(23, VI))), VF)
    f = b.fsub(f, constant(1.0))
    n = b.sitofp(power, VF)
    y = constant(_LOG[0])
    for c in _LOG[1:]:
        y = muladd(b, y, f, constant(c))
    square = b.fmul(f, f)
    y = b.fmul(b.fmul(y, f), square)
    y = muladd(b, n, constant(LN2_LOW), y)
    y = muladd(b, square, constant(-0.5), y)
    return muladd(b, n, constant(LN2_HIGH), b.fadd(f, y))


def _signed(x: int) -> int:
    """Return the int32 with the bits of x, 0 .. 2^32 - 1."""
    return x - (x >> 31 << 32)


def _uniform(b: Any, state: Any, keys: Any) -> Any:
    """Return the uniform numbers that `noise` draws for sixteen keys, given the rest's hash."""
    x = b.mul(keys, constant(_signed(C), VI))
    x = b.add(broadcast(b, b.trunc(state, I32)), x)
    for shift, factor in ((16, M1), (13, M2)):
        x = b.xor(x, b.lshr(x, constant(shift, VI)))
        x = b.mul(x, constant(_signed(factor), VI))
    x = b.xor(x, b.lshr(x, constant(16, VI)))
    u = b.sitofp(b.and_(x, constant(0xFFFFFF, VI)), VF)
    u = b.fmul(b.fadd(u, constant(0.5)), constant(2.0**-24))
    return b.select(b.fcmp_ordered("<", u, constant(TOP)), u, constant(TOP))


def _horner(b: Any, x: Any, factors: tuple[float, ...]) -> Any:
    y = constant(factors[0])
    for c in factors[1:]:
        y = muladd(b, y, x, constant(c))
    return y


def _noise(emit: Any) -> Any:
    """Make an intrinsic: noise of sixteen keys, int32 at an address, from a row's state."""

    def typed(ctx: Any, state: Any, address: Any) -> Any:
        return lowered(
            Lanes(types.int64, types.int64),
            lambda b, state, keys: emit(b, _uniform(b, state, read(b, keys, VI))),
        )

    return intrinsic(typed)


def _gumbel(b: Any, u: Any) -> Any:
    return b.fsub(constant(-0.0), _log(b, b.fsub(constant(-0.0), _log(b, u))))


def _gaussian(b: Any, u: Any) -> Any:
    """Return sqrt(2) * erfinv(2 u - 1), scaled; without `noise`'s mean: softmax ignores it."""
    w = b.fsub(constant(-0.0), _log(b, b.fmul(b.fmul(u, constant(4.0)), b.fsub(constant(1.0), u))))
    root = call(b, "llvm.sqrt.v16f32", VF, w)
    near = _horner(b, b.fsub(w, constant(2.5)), _NEAR)
    far = _horner(b, b.fsub(root, constant(3.0)), _FAR)
    y = b.select(b.fcmp_ordered("<", w, constant(5.0)), near, far)
    x = b.fsub(b.fadd(u, u), constant(1.0))
    return b.fmul(b.fmul(x, y), constant(1.8137993642342178))  # sqrt(2) * pi / sqrt(6)


gumbel, gaussian = _noise(_gumbel), _noise(_gaussian)


@kernel_step
def hash_u32(x):  # type: ignore[no-untyped-def]
    """Return `noise`'s hash of an int64 in 0 .. 2^32 - 1, which is in the same range."""
    x = ((x ^ (x >> 16)) * M1) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * M2) & 0xFFFFFFFF
    return x ^ (x >> 16)
