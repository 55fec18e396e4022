"""Where Triton kernels can run, and how they are launched.

They run on CUDA tensors, and on CPU tensors in Triton's interpreter. Each kernel decides itself
which cases it covers. Importing this does not import Triton.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def misplaced(device: torch.device) -> list[str]:
    """Return why no Triton kernel runs on tensors of a device."""
    reasons = []
    if not _installed():
        reasons.append("Triton is not installed; pip install triton")
    if device.type != "cuda" and not (device.type == "cpu" and interpreted()):
        reasons.append(f"the tensors are on {device.type}, not on a CUDA device")
    elif device.type == "cuda" and _capability(device) < (8, 0):
        reasons.append("the GPU's compute capability is below 8.0 (Ampere)")
    return reasons


def interpreted() -> bool:
    """Return whether TRITON_INTERPRET selects the interpreter, which takes CPU tensors."""
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
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": contract}
    with on(like):
        kernel[grid](*arguments, **constants, **options)


def padded_size(size: int, least: int = 16) -> int:
    """Return the least power of 2 that is at least `size`: tile shapes are powers of 2."""
    return max(least, 1 << (size - 1).bit_length())


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
