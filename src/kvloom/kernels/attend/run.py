"""Decode attention by whichever kernel covers the case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from . import cpu, gathered, ref
from .strand import Strand

COVERAGE = {
    "cpu": (
        "1 to 8 queries a step; head_dim a multiple of 16 up to 512; exact tokens in fp32, fp16, "
        "bf16; packed at 2, 3, 4, 8 bit per channel or per token, metadata fp32, fp16, bf16; "
        "padding, softcap, bias, causal; chosen tokens: one query a step, packed at 1, 1.5, 2, 3, "
        "4, 8 bit"
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


def attend_gathered(
    q: Tensor,
    keys: Strand,
    values: Strand,
    slots: Tensor,
    begin: int,
    scale: float,
    *,
    first: ref.First | None = None,
    valid: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> ref.State | None:
    """Attend as `ref.attend_gathered` does, by the kernel that covers the case; None if none."""
    _, why = dispatch.candidate(keys.tail)
    why = why or gathered.problems(q.shape[2], keys.tail, keys.fmt, values.fmt)
    if not why and q.requires_grad and torch.is_grad_enabled():
        why = ["a gradient is asked for; call under torch.no_grad()"]
    dispatch.count("attend_gathered", "cpu", why)
    if why:
        return None
    return gathered.attend(
        q, keys, values, slots, begin, scale, first=first, valid=valid, softcap=softcap, bias=bias
    )
