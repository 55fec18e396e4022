"""`attend_prompt` on CUDA tensors: which cases its Triton kernel covers, and its call.

`scaled_dot_product_attention` is faster, but returns no log-sum-exp. Importing this does not import
Triton; the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ... import triton_runtime as cuda
from ...arguments import contiguous_rows
from ...limits import Coverage
from ...score.triton import WIDEST, Changes
from ..reference import AttentionState, unfit_prompt


def _too_wide(q: Tensor, *_: Any, **__: Any) -> str | None:
    return None if q.shape[3] <= WIDEST else f"head_dim={q.shape[3]} is above {WIDEST}"


COVERAGE = Coverage(
    ("one `head_dim`, in fp32, fp16 or bf16; no mask of query heads", unfit_prompt),
    (f"`head_dim` up to {WIDEST}", _too_wide),
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
    mask, steps = q, (0, 0)  # of no mask, which the kernel does not read
    if visible is not None:
        mask = visible.contiguous().view(torch.uint8)
        steps = mask.stride(0), mask.stride(1) * (mask.shape[1] > 1)
    side, stages = _tile(d, q.dtype == torch.float32)
    cuda.launch(
        kernels().attend_prompt, (b * hq, -(-t // side)), q,
        q, k, v, mask, out, lse, float(scale), hq, hq // hk, t, n, d,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *steps,
        DB=cuda.padded_size(d), ROWS=side, KEYS=side, warps=4, stages=stages,
        CHANGES=Changes(False, False, 0, False, visible is not None, causal),
    )  # fmt: skip
    return AttentionState(out, lse)


def _tile(d: int, exact: bool) -> tuple[int, int]:
    """Return the rows and keys of a tile, and its stages, for which registers suffice."""
    if exact:
        return (32 if d <= 64 else 16), 2
    return (64 if d <= 128 else 32), (3 if d <= 64 else 2)


@cache
def kernels() -> Any:
    """Import the kernel, and with it Triton."""
    from . import prompt_kernel

    return prompt_kernel
