"""Where Triton's kernels can run, and how they are launched, or noted down instead.

They run on CUDA tensors, and on the CPU's in Triton's interpreter. Decides nothing about what a
kernel covers. Imports Triton only when asked whether it is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .ahead import Form

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of queries, keys and values."""


class _Call(NamedTuple):
    """A launch that was noted down."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


_noted: ContextVar[list[_Call] | None] = ContextVar("kvloom_noted_launches", default=None)


def problems(x: Tensor, most: int = 512) -> list[str]:
    """Why no Triton kernel takes queries, keys or values [..., D], D up to `most`, like x."""
    found = misplaced(x.device)
    if x.dtype not in DTYPES:
        found.append(f"the tensors are {x.dtype}, not fp32, fp16 or bf16")
    if not 1 <= x.shape[-1] <= most:
        found.append(f"head_dim={x.shape[-1]} is not between 1 and {most}")
    return found


def misplaced(device: torch.device) -> list[str]:
    """Why no Triton kernel runs on tensors of a device."""
    found = []
    if not _installed():
        found.append("Triton is not installed; pip install triton")
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        found.append(f"the tensors are on {device.type}, not on a CUDA device")
    elif device.type == "cuda" and _capability(device) < (8, 0):
        found.append("the GPU's compute capability is below 8.0 (Ampere)")
    return found


def interpreted() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter, which takes CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on(x: Tensor) -> AbstractContextManager[object]:
    """Launch on the device of x: Triton launches on the current one."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    like: Tensor,
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    contract: bool = True,
    **constants: Any,
) -> None:
    """Launch a kernel on the device of `like`.

    contract: whether a product and a sum may be rounded once.
    """
    noted = _noted.get()
    if noted is not None:
        noted.append(_Call(kernel, arguments, constants, warps, stages))
        return
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": contract}
    with on(like):
        kernel[grid](*arguments, **constants, **options)


def forms(name: str, call: Callable[[], object], brief: bool, **bounds: int) -> Iterator[Form]:
    """The kernels that a call on torch's meta device would launch, as `ahead` takes them.

    bounds: registers and shared memory, as in `ahead.Form`.
    """
    from .ahead import Form, signature

    noted: list[_Call] = []
    token = _noted.set(noted)
    try:
        call()
    finally:
        _noted.reset(token)
    for kernel, arguments, constants, warps, stages in noted:
        given = dict(zip(kernel.arg_names, arguments, strict=False))
        types = signature(given)
        general = {p.name for p in kernel.params if p.do_not_specialize}
        for argument, x in given.items():  # numbers that a launch compiles for
            if argument in general:
                continue
            if isinstance(x, int) and x == 1:
                del types[argument]
                constants = {**constants, argument: 1}
            elif isinstance(x, int) and x % 16 == 0:
                types[argument] += ":16"
        title = f"{kernel.__name__} {name}"
        yield Form(title, kernel, types, constants, warps, stages, brief=brief, **bounds)


def room(size: int, least: int = 16) -> int:
    """The power of 2 that holds `size`: shapes of tiles are powers of 2."""
    return max(least, 1 << (size - 1).bit_length())


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
