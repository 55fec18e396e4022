"""Sixteen fp32 lanes as one Numba value, and loads and stores by address.

Numba leaves vectorization to the optimizer; kernels written on `Lanes` do not. LLVM splits sixteen
lanes into the registers of the CPU (AVX-512: 1, AVX2: 2, NEON: 4). Kernels write +, -, * and /
between lanes; only `fma` rounds a product and a sum once. Addresses are int64 and are not
checked: the caller of a kernel owns the memory. Decides the vector operations only. Importing this
imports Numba.
"""

from __future__ import annotations

import ctypes
import operator
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core.registry import cpu_target
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

binding.initialize_native_asmparser()  # for instructions that LLVM cannot name
WIDTH = 16
FP32, FP16, BF16, FP8 = 0, 1, 2, 3  # dtype codes; fp8: e4m3, never NaN
SIZE = {FP32: 4, FP16: 2, BF16: 2, FP8: 1}  # bytes of a number

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
VF, VI = ir.VectorType(F32, WIDTH), ir.VectorType(I32, WIDTH)
LOG2_E, LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
_ROUNDING = 1.5 * 2.0**23 + 127.0  # added to n, leaves n + 127, an exponent, in the lowest bits
# exp(r) on |r| <= ln(2) / 2, to fp32: 1 + r + r^2 * polynomial (Cephes)
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
# 2^r on 0 <= r < 1 within 3e-6 (minimax)
_POWER = (
    0.013534167781472206, 0.052011460065841675, 0.2414427548646927, 0.6930038332939148,
    1.0000026226043701,
)  # fmt: skip


class LanesType(types.Type):
    """Numba's type of sixteen fp32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


Lanes = LanesType()
_OPERATORS = {"add": "fadd", "sub": "fsub", "mul": "fmul", "truediv": "fdiv"}


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VF)


def _register(name: str, instruction: str) -> None:
    """Let kernels write an operator between lanes."""
    function = getattr(operator, name)

    @infer_global(function)
    class _Typed(ConcreteTemplate):
        cases = [signature(Lanes, Lanes, Lanes)]  # noqa: RUF012

    @lower_builtin(function, Lanes, Lanes)
    def _emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)


for _name, _instruction in _OPERATORS.items():
    _register(_name, _instruction)


# --- for those who emit LLVM's instructions ------------------------------------------------------


@cache
def features() -> frozenset[str]:
    """Return what the machine that code is compiled for has, by LLVM's names."""
    names = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return frozenset(name[1:] for name in names if name.startswith("+"))


def constant(value: float, kind: Any = VF) -> ir.Constant:
    """Return a constant in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def add_bytes(builder: Any, address: Any, offset: int) -> Any:
    """Add a constant number of bytes to an address."""
    return builder.add(address, ir.Constant(I64, offset)) if offset else address


def read(builder: Any, address: Any, kind: Any, align: int = 4) -> Any:
    """Load a value of an LLVM type."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def write(builder: Any, address: Any, value: Any) -> None:
    """Store a value."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def broadcast(builder: Any, scalar: Any) -> Any:
    """Return a scalar of any type in all lanes."""
    undefined = ir.Constant(ir.VectorType(scalar.type, WIDTH), ir.Undefined)
    vector = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(vector, undefined, constant(0, VI))


def gather_f32(builder: Any, table: Any, index: Any) -> Any:
    """Load the fp32 numbers of a table at sixteen int32, one by one."""
    lanes = ir.Constant(VF, ir.Undefined)
    for i in range(WIDTH):
        lane = ir.Constant(I32, i)
        where = builder.zext(builder.extract_element(index, lane), I64)
        x = read(builder, builder.add(table, builder.shl(where, ir.Constant(I64, 2))), F32)
        lanes = builder.insert_element(lanes, x, lane)
    return lanes


def call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    """Call a function of LLVM."""
    fn = builder.module.declare_intrinsic(name, (), ir.FunctionType(kind, [a.type for a in args]))
    return builder.call(fn, args)


def muladd(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c."""
    return call(builder, "llvm.fmuladd.v16f32", VF, a, b, c)


def has_pairs() -> bool:
    """Whether the machine multiplies pairs of bf16 numbers: see `muladd_pairs`."""
    return "avx512bf16" in features()


def muladd_pairs(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, where each lane of a and b is two bf16 numbers; both products are added."""
    kind = ir.FunctionType(VF, [VF, VF, VF])
    return builder.call(ir.InlineAsm(kind, "vdpbf16ps $2, $1, $0", "=v,v,v,0"), [a, b, c])


@cache
def has_tiles() -> bool:
    """Whether the machine multiplies tiles of bf16 numbers (AMX), and Linux lets this process."""
    if sys.platform != "linux" or not {"amx-tile", "amx-bf16"} <= features():
        return False
    request_permission, tile_data = 0x1023, 18
    return ctypes.CDLL(None).syscall(158, request_permission, tile_data) == 0  # arch_prctl


def assembly(builder: Any, text: str, *addresses: Any) -> None:
    """Emit an instruction on tile registers and on memory; $0, $1: the addresses."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(addresses))
    constraints = ",".join([*["r"] * len(addresses), "~{memory}"])
    builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), addresses)


def reduce_add(builder: Any, x: Any) -> Any:
    """Return the sum of all lanes."""
    fn_type = ir.FunctionType(F32, [F32, VF])
    fn = builder.module.declare_intrinsic("llvm.vector.reduce.fadd.v16f32", (), fn_type)
    return builder.call(fn, [ir.Constant(F32, -0.0), x], fastmath=("reassoc",))


def loop(
    builder: Any, count: Any, first: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit a loop over i below count; `body` gets i and values, `first` at first, returns the next.

    Returns the last values.
    """
    b, before = builder, builder.block
    head, inside, after = (b.append_basic_block(name) for name in ("loop", "body", "after"))
    b.branch(head)
    b.position_at_end(head)
    begin = [ir.Constant(I64, 0), *first]
    i, *values = phis = [b.phi(x.type) for x in begin]
    b.cbranch(b.icmp_signed("<", i, count), inside, after)
    b.position_at_end(inside)
    following = body(i, list(values))
    for phi, x, y in zip(phis, begin, [b.add(i, ir.Constant(I64, 1)), *following], strict=True):
        phi.add_incoming(x, before)
        phi.add_incoming(y, b.block)
    b.branch(head)
    b.position_at_end(after)
    return list(values)


def load_barrier(builder: Any) -> None:
    """Let no load move across: else the compiler loads ahead until registers spill."""
    nothing = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
    builder.call(nothing, [])


def read_f32(builder: Any, address: Any, dtype_code: int, width: int = WIDTH) -> Any:
    """Load `width` numbers of a dtype as fp32."""
    floats, ints = ir.VectorType(F32, width), ir.VectorType(I32, width)
    if dtype_code == FP32:
        return read(builder, address, floats)
    if dtype_code == FP8:  # as fp16 below, with no infinity
        bits = builder.zext(read(builder, address, ir.VectorType(ir.IntType(8), width), 1), ints)
        sign = builder.shl(builder.and_(bits, constant(0x80, ints)), constant(24, ints))
        rest = builder.shl(builder.and_(bits, constant(0x7F, ints)), constant(20, ints))
        size = builder.fmul(builder.bitcast(rest, floats), constant(2.0**120, floats))
        return builder.bitcast(builder.or_(builder.bitcast(size, ints), sign), floats)
    if dtype_code == FP16 and "f16c" in features():
        halves = read(builder, address, ir.VectorType(ir.HalfType(), width), align=2)
        return builder.fpext(halves, floats)
    half = read(builder, address, ir.VectorType(ir.IntType(16), width), align=2)
    bits = builder.zext(half, ints)
    if dtype_code == BF16:
        return builder.bitcast(builder.shl(bits, constant(16, ints)), floats)
    # without an instruction: a product corrects the exponent's bias, of subnormal numbers too
    sign = builder.shl(builder.and_(bits, constant(0x8000, ints)), constant(16, ints))
    rest = builder.and_(bits, constant(0x7FFF, ints))
    small = builder.bitcast(builder.shl(rest, constant(13, ints)), floats)
    size = builder.bitcast(builder.fmul(small, constant(2.0**112, floats)), ints)
    endless = builder.icmp_unsigned(">=", rest, constant(0x7C00, ints))
    size = builder.select(endless, builder.or_(size, constant(0x7F800000, ints)), size)
    return builder.bitcast(builder.or_(size, sign), floats)


# --- for kernels ---------------------------------------------------------------------------------


def lowered(signature: Any, emit: Any) -> Any:
    """Return what an intrinsic returns that emits code of its arguments."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        got = emit(builder, *args)
        return context.get_dummy_value() if got is None else got

    return signature, codegen


@intrinsic
def load(ctx: Any, address: Any) -> Any:
    """Load sixteen fp32 numbers."""
    return lowered(Lanes(types.int64), lambda b, a: read(b, a, VF))


@intrinsic(prefer_literal=True)
def load_any(ctx: Any, address: Any, dtype_code: Any) -> Any:
    """Load sixteen numbers of a dtype, a constant."""
    code = dtype_code.literal_value
    return lowered(Lanes(types.int64, dtype_code), lambda b, a, _: read_f32(b, a, code))


@intrinsic(prefer_literal=True)
def load_one(ctx: Any, address: Any, dtype_code: Any) -> Any:
    """Load one number of a dtype, a constant."""
    code, zero = dtype_code.literal_value, ir.Constant(I32, 0)
    return lowered(
        types.float32(types.int64, dtype_code),
        lambda b, a, _: b.extract_element(read_f32(b, a, code, 1), zero),
    )


@intrinsic
def store(ctx: Any, address: Any, x: Any) -> Any:
    """Store sixteen fp32 numbers."""
    return lowered(types.void(types.int64, Lanes), lambda b, a, x: write(b, a, x))


@intrinsic
def store_one(ctx: Any, address: Any, x: Any) -> Any:
    """Store one fp32 number."""
    return lowered(types.void(types.int64, types.float32), lambda b, a, x: write(b, a, x))


@intrinsic
def load_byte(ctx: Any, address: Any) -> Any:
    """Load the byte at an address."""
    byte = ir.IntType(8)
    return lowered(types.int64(types.int64), lambda b, a: b.zext(read(b, a, byte, 1), I64))


@intrinsic
def load_i32(ctx: Any, address: Any) -> Any:
    """Load the int32 at an address."""
    return lowered(types.int64(types.int64), lambda b, a: b.sext(read(b, a, I32), I64))


@intrinsic
def splat(ctx: Any, x: Any) -> Any:
    """Return a scalar in all lanes."""
    return lowered(Lanes(types.float32), broadcast)


@intrinsic
def fma(ctx: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c."""
    return lowered(Lanes(Lanes, Lanes, Lanes), muladd)


@intrinsic
def maximum(ctx: Any, a: Any, b: Any) -> Any:
    """Return the larger of a and b, lane by lane."""
    return lowered(Lanes(Lanes, Lanes), lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@intrinsic
def minimum(ctx: Any, a: Any, b: Any) -> Any:
    """Return the smaller of a and b, lane by lane."""
    return lowered(Lanes(Lanes, Lanes), lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))


@intrinsic
def sum_lanes(ctx: Any, x: Any) -> Any:
    """Return the sum of all lanes."""
    return lowered(types.float32(Lanes), reduce_add)


@intrinsic
def first_lane(ctx: Any, x: Any) -> Any:
    """Return the first lane."""
    zero = ir.Constant(I32, 0)
    return lowered(types.float32(Lanes), lambda b, x: b.extract_element(x, zero))


@intrinsic
def max_lanes(ctx: Any, x: Any) -> Any:
    """Return the largest lane that is a number, -inf where none is.

    LLVM's own reduction, which NaN may enter, goes lane by lane.
    """

    def emit(b: Any, x: Any) -> Any:
        x = b.select(b.fcmp_ordered("==", x, x), x, constant(float("-inf")))
        for half in (8, 4, 2, 1):
            pick = ir.Constant(VI, [i ^ half for i in range(WIDTH)])
            other = b.shuffle_vector(x, ir.Constant(VF, ir.Undefined), pick)
            x = b.select(b.fcmp_ordered(">", x, other), x, other)
        return b.extract_element(x, ir.Constant(I32, 0))

    return lowered(types.float32(Lanes), emit)


@intrinsic
def first_lanes(ctx: Any, x: Any, count: Any) -> Any:
    """Return the first `count` lanes of x, -inf in the others."""

    def emit(b: Any, x: Any, count: Any) -> Any:
        lane = ir.Constant(VI, list(range(WIDTH)))
        few = broadcast(b, b.trunc(count, I32))
        return b.select(b.icmp_signed("<", lane, few), x, constant(float("-inf")))

    return lowered(Lanes(Lanes, types.int64), emit)


@intrinsic
def masked_lanes(ctx: Any, x: Any, address: Any) -> Any:
    """Return x where the sixteen bytes at address are not 0, else -inf."""

    def emit(b: Any, x: Any, address: Any) -> Any:
        kind = ir.VectorType(ir.IntType(8), WIDTH)
        flags = read(b, address, kind, align=1)
        return b.select(b.icmp_unsigned("!=", flags, constant(0, kind)), x, constant(float("-inf")))

    return lowered(Lanes(Lanes, types.int64), emit)


@intrinsic
def exp(ctx: Any, x: Any) -> Any:
    """Return e^x to fp32's precision; 0 below -87, where fp32 ends, e^88 above 88, NaN of NaN."""
    return lowered(Lanes(Lanes), _exp)


def _exp(b: Any, x: Any) -> Any:
    x = b.select(b.fcmp_ordered(">", x, constant(88.0)), constant(88.0), x)
    low = b.fcmp_ordered("<", x, constant(-87.0))
    rounded = muladd(b, x, constant(float(LOG2_E)), constant(_ROUNDING))
    n = b.fsub(rounded, constant(_ROUNDING))
    r = muladd(b, n, constant(-LN2_HIGH), x)
    r = muladd(b, n, constant(-LN2_LOW), r)
    y = constant(_EXP[0])
    for c in _EXP[1:]:
        y = muladd(b, y, r, constant(c))
    y = muladd(b, y, b.fmul(r, r), b.fadd(r, constant(1.0)))
    power = b.shl(b.bitcast(rounded, VI), constant(23, VI))
    return b.select(low, constant(0.0), b.fmul(y, b.bitcast(power, VF)))


@intrinsic
def power_of_2(ctx: Any, x: Any) -> Any:
    """Return 2^x within 3e-6 of it, for x of at most 120; 0 of -inf, NaN of NaN."""

    def emit(b: Any, x: Any) -> Any:
        if "avx512dq" not in features():
            return _exp(b, b.fmul(x, constant(float(LN_2))))
        one, two = ir.FunctionType(VF, [VF]), ir.FunctionType(VF, [VF, VF])
        r = b.call(ir.InlineAsm(one, "vreduceps $$1, $1, $0", "=v,v"), [x])  # x - floor(x)
        y = constant(_POWER[0])
        for c in _POWER[1:]:
            y = muladd(b, y, r, constant(c))
        return b.call(ir.InlineAsm(two, "vscalefps $2, $1, $0", "=v,v,v"), [y, x])

    return lowered(Lanes(Lanes), emit)


@intrinsic
def prefetch(ctx: Any, address: Any) -> Any:
    """Prefetch a cache line."""

    def emit(b: Any, address: Any) -> None:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        fn = b.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        b.call(fn, [b.inttoptr(address, byte), *(ir.Constant(I32, i) for i in (0, 3, 1))])

    return lowered(types.void(types.int64), emit)
