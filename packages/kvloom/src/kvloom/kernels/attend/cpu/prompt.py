"""`attend_prompt` on CPU tensors: torch's fused attention, and the call of a compiled kernel.

Torch's runs in fp32. The kernel runs in bf16, where torch's takes most of a prompt's time on
processors with AVX-512 and without AMX. Both return the log-sum-exp. Importing this does not import
Numba; the first call of the kernel does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import dispatch
from ...arguments import padded, strides
from ...limits import Coverage
from ..reference import AttentionState, unfit_prompt
from .arguments import PROMPT

_PRODUCTS_PER_THREAD = 1 << 21


def _unfit_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> str | None:
    if q.shape[3] == k.shape[3] == v.shape[3] and q.shape[3] % 32 == 0:
        return None
    return f"head_dim={q.shape[3]}, {k.shape[3]}, {v.shape[3]} is not one multiple of 32"


def _other_dtypes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> str | None:
    if q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.bfloat16):
        return None
    return f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}, not all fp32 or bf16"


def masked(
    q: Tensor, k: Tensor, *_: Any, causal: bool = True, visible: Tensor | None = None
) -> bool:
    """Return whether causal queries see tokens before them, or padding is hidden from them."""
    return causal and (q.shape[2] < k.shape[2] or visible is not None)


def _masked_fp32(q: Tensor, *args: Any, **options: Any) -> str | None:
    if q.dtype != torch.float32 or not masked(q, *args, **options):
        return None
    return "causal queries in fp32 have tokens before them, or padding"


def _other_machine(q: Tensor, *_: Any, **__: Any) -> str | None:
    if q.dtype != torch.bfloat16:
        return None
    with dispatch.loading():
        from ... import simd
    if simd.has_pairs() and "amx-bf16" not in simd.features():
        return None
    return "the processor has no AVX-512 BF16, or has AMX, where torch is fast"


COVERAGE = Coverage(
    ("`head_dim` a multiple of 32", _unfit_shapes),
    ("no mask of query heads", unfit_prompt),
    ("fp32 or bf16", _other_dtypes),
    ("causal fp32 queries of all tokens, without padding", _masked_fp32),
    ("in bf16, AVX-512 BF16 without AMX", _other_machine),
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
    """Attend to exact tokens.

    q: bf16 [B, Hq, T, D]. k, v: bf16 [B, Hk, N, D]. causal: the T queries are the last of the N
    tokens, and see no later one. visible: bool [B, 1 or Hk, N], False hides a key. Returns out in
    bf16; 0 for a query that sees no key.
    """
    kernel, rows, panel, tile, blocks = compiled()
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    room = rows * blocks
    queries, keys = _pairs_of(q, rows, room), _pairs_of(k, panel, tile)
    values = _whole(v, tile).view(b, hk, -1, tile // 2, 2, d // panel, panel)
    values = values.permute(0, 1, 2, 5, 3, 6, 4).contiguous()
    out = torch.empty(b, hq, t, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, hq, t, dtype=torch.float32, device=q.device)
    threads = min(torch.get_num_threads(), 1 + b * hq * t * n * d // _PRODUCTS_PER_THREAD)
    size = room * (tile + tile // 2 + d + 3)
    scratch = torch.empty(threads, size, dtype=torch.float32, device=q.device)
    seen = None if visible is None else padded(visible.expand(b, -1, n)).expand(b, hk, -1)
    packed = PROMPT.pack(
        batch=b, group=hq // hk, queries=t, tokens=n, causal=causal, head_dim=d,
        kv_heads=hk,
        q=queries.data_ptr(), keys=keys.data_ptr(), values=values.data_ptr(),
        visible=strides(seen, 2), out=out.data_ptr(),
        lse=lse.data_ptr(), scale=scale, scratch=scratch.data_ptr(), scratch_bytes=4 * size,
    )  # fmt: skip
    kernel.run(packed, 1, threads)
    return AttentionState(out, lse)


def _whole(x: Tensor, unit: int) -> Tensor:
    """Return x [B, H, N, D] with zeros up to a multiple of `unit` tokens, contiguous."""
    return F.pad(x, (0, 0, 0, -x.shape[2] % unit)).contiguous()


def _pairs_of(x: Tensor, panel: int, unit: int) -> Tensor:
    """Return x as pairs of numbers [B, H, N / panel, D / 2, panel], N a multiple of `unit`."""
    pairs = _whole(x, unit).view(torch.float32).unflatten(2, (-1, panel))
    return pairs.transpose(-1, -2).contiguous()


@cache
def compiled() -> tuple[Any, int, int, int, int]:
    """Compile the kernel; return it, its rows at once, panel, tile and blocks of rows."""
    with dispatch.loading():
        from . import prompt_kernel as kernel
    return kernel.prompt(), kernel.ROWS, kernel.PANEL, kernel.TILE, kernel.BLOCKS


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = True,
    visible: Tensor | None = None,
) -> AttentionState:
    """Attend as `attend` does, by torch's fused attention; if causal, N = T."""
    b, hq, t, d = q.shape
    hk = k.shape[1]
    mask = sees_none = None
    if visible is not None:
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=q.device)
        mask = mask.masked_fill_(~visible, -torch.inf)[:, :, None]
        sees_none = ~visible.cummax(dim=-1).values if causal else ~visible.any(-1, keepdim=True)
    if causal:  # else the query heads of a group are rows of one head
        k, v = (x.repeat_interleave(hq // hk, dim=1) for x in (k, v))
        if mask is not None and mask.shape[1] > 1:
            mask = mask.repeat_interleave(hq // hk, dim=1)
    rows = q if causal else q.reshape(b, hk, hq // hk * t, d)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    out, lse = out.reshape(b, hq, t, d), lse.reshape(b, hq, t)
    if sees_none is not None:  # torch's is 0
        lse = lse.unflatten(1, (hk, -1)).masked_fill(sees_none[:, :, None], -torch.inf)
    return AttentionState(out, lse.view(b, hq, t))


def bind(q: Tensor, *_: Any, **__: Any) -> Callable[..., AttentionState]:
    """Return what attends to tokens of the queries' dtype, once it is compiled."""
    if q.dtype == torch.float32:
        return fused
    compiled()
    return attend
