"""Appending exact tokens on CPU tensors by a compiled kernel: how it is called.

Decoding one token, torch needs eight operations for what is a copy of a few hundred numbers.
Importing this does not import Numba, the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ..reference import Room, Sides

MOST = 8  # tokens of a step: more are worth torch's threads
_INTS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def problems(x: Tensor) -> list[str]:
    """Why no kernel appends tokens x [B, Hk, T, D]; empty if one does."""
    found = []
    if x.dtype not in _INTS:
        found.append(f"tokens are {x.dtype}, not fp32, fp16 or bf16")
    if x.shape[3] % 16:
        found.append(f"head_dim={x.shape[3]} is not a multiple of 16")
    if x.shape[2] > MOST:
        found.append(f"more than {MOST} tokens a step")
    return found


def append(new: Sides, rooms: tuple[Room, ...], most: tuple[float, ...] | None) -> bool:
    """Append as `ref.append` does; only cases without `problems`, a head's own `at` contiguous."""
    held = [x if x.stride(3) == 1 else x.contiguous() for x in new]
    dtype = new[0].dtype
    kernel, side, sides = _kernel(dtype.itemsize)
    numbers = [*new[0].shape, len(new)]
    for i, (data, at) in enumerate(rooms):
        x, bits = held[i], -1 if most is None else _bits(most[i], dtype)
        here, each = (0, at.data_ptr()) if isinstance(at, Tensor) else (at, 0)
        numbers += (x.data_ptr(), *x.stride(), data.data_ptr(), *data.stride(), here, each, bits, 0)
    job = kernel.run(numbers, 0, 1)
    return not any(job[side + sides - 1 :: sides])


@cache
def _bits(most: float, dtype: torch.dtype) -> int:
    """The bits of the largest finite number of a dtype that is no larger than `most`."""
    limit = torch.tensor(min(most, torch.finfo(dtype).max), dtype=torch.float64)
    near = limit.to(dtype)
    return int(near.view(_INTS[dtype]).item()) - int(near.double() > limit)


@cache
def _kernel(width: int) -> Any:
    with dispatch.loading():
        from .append_kernel import SIDE, SIDES, kernel
    return kernel(width), SIDE, SIDES
