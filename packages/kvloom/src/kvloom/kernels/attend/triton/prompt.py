"""`attend_prompt` on CUDA tensors: which cases its Triton kernel covers, and its call.

torch's fused attention is faster, but does not return the log-sum-exp. Importing this does not
import Triton; the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ... import triton_runtime as cuda
from ...arguments import contiguous_rows
from ...limits import Coverage, dtype_problem
from ...score.triton import WIDEST, Changes
from ..reference import AttentionState


def _unfit_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> str | None:
    if q.shape[3] == k.shape[3] == v.shape[3] <= WIDEST:
        return None
    return f"head_dim={q.shape[3]}, {k.shape[3]}, {v.shape[3]} is not one number up to {WIDEST}"


def _other_dtypes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> str | None:
    if q.dtype == k.dtype == v.dtype:
        return dtype_problem(k.dtype, "queries, keys and values are")
    return f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}"


COVERAGE = Coverage(
    (f"`head_dim` up to {WIDEST}", _unfit_shapes),
    ("queries, keys and values all in fp32, fp16 or bf16", _other_dtypes),
    ("no gradient", dispatch.gradient_problem),
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = True,
    visible: Tensor | None = None,
) -> AttentionState:
    """Attend as `reference.attend_prompt` does; out is in q's dtype."""
    (b, hq, t, d), (hk, n) = q.shape, k.shape[1:3]
    out, lse = q.new_empty(b, hq, t, d), q.new_empty(b, hq, t, dtype=torch.float32)
    if not out.numel():
        return AttentionState(out, lse)
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    mask, steps = q, (0, 0)
    if visible is not None:
        mask = visible.contiguous().view(torch.uint8)
        steps = (visible.shape[0] > 1) * mask.stride(0), (visible.shape[1] > 1) * mask.stride(1)
    exact = q.dtype == torch.float32
    side = 64 >> (exact + (d > (64 if exact else 128)))
    cuda.launch(
        kernels().attend_prompt, (-(-t // side), b * hq), q,
        q, k, v, mask, out, lse, float(scale), hq, hq // hk, t, n, d,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *steps,
        DB=cuda.padded_size(d), ROWS=side, KEYS=side, warps=4, stages=2 if exact or d > 64 else 3,
        CHANGES=Changes(False, False, 0, False, visible is not None, causal),
    )  # fmt: skip
    return AttentionState(out, lse)


@cache
def kernels() -> Any:
    """Import the kernel, and with it Triton."""
    from . import prompt_kernel

    return prompt_kernel
