"""Decode attention by whichever kernel covers the case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from . import cpu, ref
from .strand import Strand

COVERAGE = {
    "cpu": (
        "1 to 8 queries a step; head_dim a multiple of 16 up to 512; exact tokens in fp32, fp16, "
        "bf16; packed in any format of the store but rotated 8 bit, keys before RoPE that are "
        "divided or rotated, and more than 128 groups a token; padding, softcap, bias, causal"
    ),
}
"""What a backend covers; `ref` runs the rest."""


def attends(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why `attend` of so many queries a step would be left to the reference; empty if it is not.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, None where all are
    exact.
    """
    _, why = dispatch.candidate(like)
    return why or cpu.problems(tokens, like, keys, values)


def attend(
    q: Tensor,
    keys: Strand,
    values: Strand,
    scale: float,
    *,
    causal: bool = False,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> ref.State | None:
    """Attend as `ref.attend` does, by the kernel that covers the case; None if none does."""
    why = attends(q.shape[2], keys.tail, keys.fmt, values.fmt)
    if not why and q.requires_grad and torch.is_grad_enabled():
        why = ["a gradient is asked for; call under torch.no_grad()"]
    dispatch.count("attend", "cpu", why)
    if why:
        return None
    return cpu.attend(
        q, keys, values, scale, causal=causal, valid=valid, softcap=softcap, bias=bias
    )
