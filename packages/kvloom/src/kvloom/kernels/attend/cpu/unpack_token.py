"""One token out of the bytes that its pack block shares, as LLVM instructions for one format.

Decides how a chosen token becomes fp32 numbers in memory: its codes are extracted from the block's
bytes, scales and zeros are read as they are stored (so x of `dequant` is the code itself), and a
key packed before RoPE is rotated to its position: by a multiple of `FAR`, then by the
rest.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...cpu_runtime import kernel_step
from ...simd import (
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
    lowered,
    read,
    read_f32,
    write,
)
from .dequant import Meta, lane_isa
from .microkernel import apply_rope, rotation_groups
from .variant import MAP, SideConstants, from_literal


@kernel_step
def out_of_block(t, bits_x2):  # type: ignore[no-untyped-def]
    """Return what extracts token t from a byte: a shift, or for five digits a factor."""
    if bits_x2 == 3:
        extractor = 270 * 81  # see `dequant`: the fraction without all higher digits
        for _ in range(t):
            extractor //= 3
        return extractor
    return t if bits_x2 == 6 else t * (bits_x2 // 2)


@intrinsic(prefer_literal=True)
def unpack(
    ctx: Any,
    out: Any,
    base: Any,
    stride: Any,
    t: Any,
    extractor: Any,
    scale: Any,
    zero: Any,
    table: Any,
    room: Any,
    near: Any,
    far: Any,
    d: Any,
    literal: Any,
    dtype_code: Any,
) -> Any:
    """Write token t of a pack block to `out`, fp32 [d].

    base, stride: the block's first byte row, and from one to the next. extractor: `out_of_block` of
    t. scale, zero: the token's, of dtype `dtype_code`. table: see `dequant.Meta`. room: fp32 for
    twice as many as a token has groups by map, in whole vectors. near, far: rows of `rope_tables`
    that together rotate a key packed before RoPE to its position.
    """
    constants = from_literal(literal.literal_value)
    n_d, meta_dtype = d.literal_value, dtype_code.literal_value

    def emit(b: Any, *args: Any) -> None:
        out, base, stride, t, extractor, scale, zero, table, room, near, far = args[:11]
        meta = Meta(scale, b.sub(zero, scale), table, lane_isa(), meta_dtype)
        if constants.by == MAP:
            meta = _widened(b, meta, room, constants)
        code = _taker(b, base, stride, t, extractor, constants)
        for vs in rotation_groups(n_d, constants):
            xs = {}
            for v in vs:
                x = code(v) if constants.levels else b.sitofp(code(v), VF)
                xs[v] = meta.scaled(b, x, 0, v, n_d, constants)
            for row in (near, far) if constants.rope_dims else ():
                xs = apply_rope(b, xs, row, n_d, constants, back=False)
            for v, x in xs.items():
                write(b, add_bytes(b, out, 4 * WIDTH * v), x)

    return lowered(types.void(*[types.int64] * 11, d, literal, dtype_code), emit)


def _taker(b: Any, base: Any, stride: Any, t: Any, extractor: Any, constants: SideConstants) -> Any:
    """Return a function that takes the number of a vector, and returns its sixteen codes, int32."""
    bits = constants.bits
    amount = broadcast(b, b.trunc(extractor, I32))
    bytes_type = ir.VectorType(ir.IntType(8), WIDTH)

    def byte(row: Any, v: int) -> Any:
        return b.zext(read(b, add_bytes(b, row, WIDTH * v), bytes_type, 1), VI)

    def masked(x: Any, shift: Any, mask: int) -> Any:
        return b.and_(b.lshr(x, shift), constant(mask, VI))

    if bits == 1.5:
        return lambda v: b.lshr(
            b.mul(masked(b.mul(byte(base, v), amount), constant(0, VI), 0xFFFF), constant(3, VI)),
            constant(16, VI),
        )
    if bits == 3:
        four, two = (ir.Constant(I64, x) for x in (4, 2))
        low = b.add(base, b.mul(stride, b.udiv(t, four)))
        high = b.add(base, b.mul(stride, two))
        low_amount = broadcast(b, b.trunc(b.mul(b.urem(t, four), two), I32))
        return lambda v: b.or_(
            masked(byte(low, v), low_amount, 3),
            b.shl(masked(byte(high, v), amount, 1), constant(2, VI)),
        )
    return lambda v: masked(byte(base, v), amount, 2 ** int(bits) - 1)


def _widened(b: Any, meta: Meta, room: Any, constants: SideConstants) -> Meta:
    """Write S and Z of a token's groups in fp32 to `room`, in whole vectors; return where."""
    z_offset = 4 * WIDTH * -(-constants.across // WIDTH)
    zeros = b.add(meta.base, meta.z_offset), add_bytes(b, room, z_offset)
    for place, out in ((meta.base, room), zeros):
        for lo in range(0, constants.across, WIDTH):
            count = min(WIDTH, constants.across - lo)
            x = read_f32(b, add_bytes(b, place, lo * SIZE[meta.dtype_code]), meta.dtype_code, count)
            lanes = [min(i, count - 1) for i in range(WIDTH)]
            x = b.shuffle_vector(x, ir.Constant(x.type, ir.Undefined), ir.Constant(VI, lanes))
            write(b, add_bytes(b, out, 4 * lo), x)
    return meta._replace(base=room, z_offset=ir.Constant(I64, z_offset), dtype_code=FP32)
