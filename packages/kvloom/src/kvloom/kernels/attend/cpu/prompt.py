"""The operation `attend_prompt`: attention of many queries to exact tokens.

On CPU tensors a compiled kernel runs it, whose coverage and call are here: torch's fused attention
takes most of a prompt's time on processors with AVX-512 and without AMX. Importing this does not
import Numba; the first call does.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import dispatch
from ...arguments import padded, strides
from ...dispatch import Backend, Binding, Op, differentiated
from ...limits import Coverage
from .. import reference
from ..reference import AttentionState
from .arguments import ABSENT, PROMPT

_PRODUCTS_PER_THREAD = 1 << 21


def _unfit_shapes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> str | None:
    if q.shape[3] == k.shape[3] == v.shape[3] and q.shape[3] % 32 == 0:
        return None
    return f"head_dim={q.shape[3]}, {k.shape[3]}, {v.shape[3]} is not one multiple of 32"


def _other_dtypes(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> str | None:
    if q.dtype == k.dtype == v.dtype == torch.bfloat16:
        return None
    return f"queries are {q.dtype}, keys {k.dtype} and values {v.dtype}, not bf16"


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
    ("bf16", _other_dtypes),
    ("processors with AVX-512 BF16 and without AMX", _other_machine),
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
        visible=ABSENT if seen is None else strides(seen, 2), out=out.data_ptr(),
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


def _case(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Hashable]:
    dims = q.shape[3], k.shape[3], v.shape[3]
    return q, (dims, q.dtype, k.dtype, v.dtype, differentiated(q))


attend_prompt = Op(
    "attend_prompt",
    reference.attend_prompt,
    _case,
    cpu=Backend(Binding(attend, compiled), COVERAGE),
)
"""`ops` lists it with the others; it is here because `many_queries` runs it, too."""
