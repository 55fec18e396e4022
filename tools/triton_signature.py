"""A variant of a Triton kernel: the types of its arguments, its constants and its limits.

Decides how a call becomes types; `triton_variants` decides which calls. Imports no Triton.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
}


class Variant(NamedTuple):
    """One way to compile a kernel.

    signature: argument -> "*bf16:16" (a pointer, divisible by 16), "i32", "i32:16", "fp32", or a
    named tuple of these, in the kernel's order, constants left out. constants: the kernel's
    tl.constexpr arguments. maxnreg: registers that the launch allows a thread. registers (per
    thread), shared (bytes): limits. brief: the tests compile it too, not only `benchmarks/aot.py`.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    maxnreg: int | None = None
    registers: int = 255
    shared: int = 99 << 10
    brief: bool = False


def signature(arguments: Mapping[str, Any], general: Collection[str] = ()) -> dict[str, Any]:
    """Return the types of a call's arguments; tensors may be on torch's meta device.

    Assumes that tensors are aligned to 16 bytes. As in a launch, integers that 16 divides are
    marked, but for the arguments `general`. None is a constant.
    """
    return {name: _type(x, name not in general) for name, x in arguments.items() if x is not None}


def _type(x: Any, special: bool) -> Any:
    """Return the type of an argument; of a named tuple, one with the types of its fields."""
    if isinstance(x, tuple):
        return type(x)(*(_type(field, special) for field in x))
    if isinstance(x, Tensor):
        return f"*{_TYPES[x.dtype]}:16"
    if isinstance(x, float):
        return "fp32"
    return "i32:16" if special and x % 16 == 0 else "i32"
