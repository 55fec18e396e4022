"""Where Triton's kernels can run: on CUDA tensors, or on the CPU's in Triton's interpreter.

Decides nothing about what a kernel covers. Imports Triton only when asked whether it is there.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Of queries, keys and values."""


def interpreted() -> bool:
    """Whether TRITON_INTERPRET asks for the interpreter, which takes CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def problems(x: Tensor) -> list[str]:
    """Why no Triton kernel takes a tensor [..., D] of queries, keys or values."""
    found = []
    if not _installed():
        found.append("Triton is not installed; pip install triton")
    if x.device.type != "cuda" and not (x.device.type == "cpu" and interpreted()):
        found.append(f"the tensors are on {x.device.type}, not on a CUDA device")
    if x.dtype not in DTYPES:
        found.append(f"the tensors are {x.dtype}, not fp32, fp16 or bf16")
    if not 1 <= x.shape[-1] <= 512:
        found.append(f"head_dim={x.shape[-1]} is more than 512")
    return found


def on(x: Tensor) -> AbstractContextManager[object]:
    """Launch on the device of x: Triton launches on the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def room(size: int, least: int = 16) -> int:
    """The power of 2 that holds `size`: shapes of tiles are powers of 2."""
    return max(least, 1 << (size - 1).bit_length())


@cache
def _installed() -> bool:
    return find_spec("triton") is not None
