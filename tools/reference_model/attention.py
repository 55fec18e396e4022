"""Causal attention for training on a CPU, two to three times as fast as torch's.

Batched matrix products over chunks of queries: chunk c attends to keys 0 to the end of c, so half
of the score matrix is never computed, and the rest stays in the processor's cache. Only for whole
sequences from position 0 without padding; inference does not use it.
"""

from __future__ import annotations

from typing import Any

import torch


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend causally: q `[B, Hq, T, D]`, k and v `[B, Hk, T, D]` → `[B, Hq, T, D]`."""
    rows = max(1, 8192 // q.shape[2] // 2)
    parts = zip(q.split(rows), k.split(rows), v.split(rows), strict=True)
    return torch.cat([_by_chunks(*part) for part in parts])


def _by_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    B, Hq, T, D = q.shape
    Hk = k.shape[1]
    R = Hq // Hk
    C = 128 if T <= 1024 else 256
    later = torch.full((C, C), float("-inf"), dtype=q.dtype).triu(1).repeat(R, 1)  # [R*C, C]
    q = (q * D**-0.5).view(B, Hk, R, T, D)
    outs = []
    for begin in range(0, T, C):
        end = min(T, begin + C)
        n = end - begin
        b_q = q[:, :, :, begin:end].reshape(B * Hk, R * n, D)
        b_k = k[:, :, :end].reshape(B * Hk, end, D)
        b_v = v[:, :, :end].reshape(B * Hk, end, D)
        scores = torch.bmm(b_q, b_k.transpose(1, 2))  # [B*Hk, R*n, end]
        scores[:, :, begin:] += later.view(R, C, C)[:, :n, :n].reshape(R * n, n)
        outs.append(torch.bmm(scores.softmax(-1), b_v).view(B, Hk, R, n, D))
    return torch.cat(outs, 3).view(B, Hq, T, D)


def register(name: str = "kvloom_training") -> str:
    """Register the attention with transformers; return the name for `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, _attention_forward)
    return name


def _attention_forward(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    with torch.autocast("cpu", enabled=False):
        out = causal_attention(query.bfloat16(), key.bfloat16(), value.bfloat16())
    return out.transpose(1, 2), None
