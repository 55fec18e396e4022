"""Appending exact tokens on CPU tensors: which cases the compiled kernel covers, and its call.

For a decode step torch needs eight operations to copy a few hundred numbers. Importing this does
not import Numba; the first call does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from ..arguments import APPEND, APPEND_SIDE
from ..limits import MAX_STEP, Coverage, dtype_problem
from .reference import Sides, WriteTarget

_INTS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def _head_dim_problem(x: Tensor, v: Tensor) -> str | None:
    d = x.shape[3]
    if v.shape[3] != d:
        return f"head_dim={d} of keys is not that of values, {v.shape[3]}"
    return None if d % 16 == 0 else f"head_dim={d} is not a multiple of 16"


def _many_tokens(x: Tensor, v: Tensor) -> str | None:
    return None if x.shape[2] <= MAX_STEP else f"more than {MAX_STEP} tokens a step"


COVERAGE = Coverage(
    ("fp32, fp16, bf16", lambda x, v: dtype_problem(x.dtype)),
    ("`head_dim` a multiple of 16, the same of both sides", _head_dim_problem),
    (f"1–{MAX_STEP} tokens", _many_tokens),
)


def bind(new: Sides, *_: Any, **__: Any) -> Callable[..., bool]:
    """Return `append`, once the kernel for tokens such as `new` is compiled."""
    compiled(new[0].dtype)
    return append


def append(
    new: Sides, targets: tuple[WriteTarget, ...], max_abs: tuple[float, ...] | None = None
) -> bool:
    """Append as `reference.append` does; a target's tensor `row` is contiguous."""
    b, h, t, d = new[0].shape
    dtype = new[0].dtype
    limits = (-1, -1)
    if max_abs is not None:
        limits = _max_bits(max_abs[0], dtype), _max_bits(max_abs[1], dtype)
    k, v = new
    k_steps, v_steps = k.stride(), v.stride()
    if k_steps[3] != 1 or v_steps[3] != 1:
        k, v = k.contiguous(), v.contiguous()
        k_steps, v_steps = k.stride(), v.stride()
    (k_out, k_row), (v_out, v_row) = targets
    k_rows = (k_row, 0) if isinstance(k_row, int) else (0, k_row.data_ptr())
    v_rows = (v_row, 0) if isinstance(v_row, int) else (0, v_row.data_ptr())
    arguments = APPEND.pack(
        batch=b, heads=h, tokens=t, head_dim=d,
        keys=APPEND_SIDE.pack(
            (k.data_ptr(), *k_steps), (k_out.data_ptr(), *k_out.stride()), *k_rows, limits[0]
        ),
        values=APPEND_SIDE.pack(
            (v.data_ptr(), *v_steps), (v_out.data_ptr(), *v_out.stride()), *v_rows, limits[1]
        ),
        exceeded=0,
    )  # fmt: skip
    return not compiled(dtype).run(arguments, 0, 1)[APPEND.numbers]


@cache
def compiled(dtype: torch.dtype) -> Any:
    """Compile the kernel for tokens of a dtype."""
    with dispatch.loading():
        from .cpu_kernel import kernel
    return kernel(dtype.itemsize)


@cache
def _max_bits(max_abs: float, dtype: torch.dtype) -> int:
    """Return the bits of the largest finite number of a dtype that is no larger than `max_abs`."""
    limit = torch.tensor(min(max_abs, torch.finfo(dtype).max), dtype=torch.float64, device="cpu")
    near = limit.to(dtype)
    return int(near.view(_INTS[dtype]).item()) - int(near.double() > limit)
