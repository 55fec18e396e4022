"""`attend_prompt` on CPU tensors: torch's fused attention, and the call of a compiled kernel.

The kernel runs in bf16 on processors with AVX-512 BF16, where torch's takes most of a prompt's
time; with AMX it multiplies tiles. Both return the log-sum-exp. Importing this does not import
Numba; the first choice in bf16 does.
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
from ...score.arguments import PAIRS, TILES
from ..reference import AttentionState, merge, unfit_prompt
from .arguments import PROMPT

_PRODUCTS_PER_THREAD = 1 << 21


COVERAGE = Coverage(
    ("one `head_dim`, in fp32, fp16 or bf16; no mask of query heads", unfit_prompt),
    ("no gradient", dispatch.gradient_problem),
)


def compiles(q: Tensor) -> bool:
    """Return whether the compiled kernel attends, and not torch."""
    if q.dtype != torch.bfloat16 or q.shape[3] % 32:
        return False
    with dispatch.loading():
        from ... import simd
    return simd.has_pairs()


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
    kernel, unit, panel, (rows, blocks, tile) = compiled()
    b, hq, t, d = q.shape
    hk, n = k.shape[1], k.shape[2]
    room = rows * blocks
    queries = _whole(q, room) if unit == TILES else _pairs_of(q, rows, room)
    keys = _pairs_of(k, panel, tile)
    values = _whole(v, tile).view(b, hk, -1, tile // 2, 2, d // panel, panel)
    values = values.permute(0, 1, 2, 5, 3, 6, 4).contiguous()
    out = torch.empty(b, hq, t, d, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, hq, t, dtype=torch.float32, device=q.device)
    threads = min(torch.get_num_threads(), 1 + b * hq * t * n * d // _PRODUCTS_PER_THREAD)
    size = room * (tile + tile // 2 + d + 2)
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
def compiled() -> tuple[Any, int, int, tuple[int, int, int]]:
    """Compile the kernel; return it, what it multiplies at once, the panel and the other sizes."""
    with dispatch.loading():
        from ...simd import has_tiles
        from . import prompt_kernel
    unit = TILES if has_tiles() else PAIRS
    return prompt_kernel.prompt(unit), unit, prompt_kernel.PANEL, prompt_kernel.sizes(unit)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool = True,
    visible: Tensor | None = None,
) -> AttentionState:
    """Attend as `attend` does, in any dtype of q, k and v, by torch's fused attention."""
    (b, hq, t, d), (hk, n) = q.shape, k.shape[1:3]
    if causal and t < n:  # torch's causal queries begin with the first token
        states = []
        for part, own in ((slice(n - t), False), (slice(n - t, n), True)):
            shown = None if visible is None else visible[..., part]
            state = fused(q, k[:, :, part], v[:, :, part], scale, causal=own, visible=shown)
            states.append(AttentionState(state.out.float(), state.lse))
        state = merge(states)
        return AttentionState(state.out.to(q.dtype), state.lse)
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
    """Return what attends to these queries, compiled."""
    if not compiles(q):
        return fused
    compiled()
    return attend
