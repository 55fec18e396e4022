"""Decode attention by whichever kernel covers the case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from . import reference as ref
from .cpu import decode as cpu
from .cpu import gathered
from .kv_view import Strand
from .triton import decode as gpu

COVERAGE = {
    "cpu": (
        "1 to 8 queries a step; head_dim a multiple of 16 up to 512; exact tokens in fp32, fp16, "
        "bf16; packed in any format of the store but rotated 8 bit, keys before RoPE that are "
        "divided or rotated, and more than 128 groups a token; padding, softcap, bias, causal; "
        "chosen tokens, one query a step: all of that"
    ),
    "gpu": (
        "1 to 8 queries a step; head_dim 16 to 256, in fp32 to 128; exact tokens in fp32, fp16, "
        "bf16; packed at 1, 1.5, 2, 3, 4, 8 bit per channel or per token, any transform, not "
        "before RoPE, metadata fp32, fp16, bf16, fp8; padding, softcap, bias, causal; chosen tokens"
    ),
}
"""What a backend covers; `ref` runs the rest."""

_KERNELS: dict[str, Any] = {"cpu": cpu, "gpu": gpu}
_CHOSEN: dict[str, Any] = {"cpu": gathered.attend, "gpu": gpu.attend_gathered}
_REFUSED: dict[str, Any] = {"cpu": gathered.problems, "gpu": gpu.problems}


def attends(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Why `attend` of so many queries a step would be left to the reference; empty if it is not.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, None where all are
    exact.
    """
    backend, why = dispatch.candidate(like)
    return why or _KERNELS[backend].problems(tokens, like, keys, values)


def left(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> None:
    """Note that the reference attends, and why; as in `attends`."""
    backend, _ = dispatch.candidate(like)
    why = attends(tokens, like, keys, values)
    dispatch.count("attend", backend, why or ["the packed tokens are in several pieces"])


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
    products: list[Tensor] | None = None,
) -> ref.State | None:
    """Attend as `ref.attend` does, by the kernel that covers the case; None if none does.

    products: given a list, the compiled CPU kernel leaves scale * q @ k in it, as
    `score.run.step_mass` takes them: fp32 [B, Hq, T, N and room for whole vectors of 16].
    """
    backend, why = dispatch.candidate(keys.tail)
    why = why or _KERNELS[backend].problems(q.shape[2], keys.tail, keys.fmt, values.fmt)
    why = why or _differentiated(q)
    dispatch.count("attend", backend, why)
    if why:
        return None
    more = {"products": products} if backend == "cpu" else {}
    return _KERNELS[backend].attend(
        q, keys, values, scale, causal=causal, valid=valid, softcap=softcap, bias=bias, **more
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
    backend, why = dispatch.candidate(keys.tail)
    why = why or _REFUSED[backend](q.shape[2], keys.tail, keys.fmt, values.fmt)
    why = why or _differentiated(q)
    dispatch.count("attend_gathered", backend, why)
    if why:
        return None
    return _CHOSEN[backend](
        q, keys, values, slots, begin, scale, first=first, valid=valid, softcap=softcap, bias=bias
    )


def _differentiated(q: Tensor) -> list[str]:
    """Why no kernel attends, if a gradient is asked for."""
    if q.requires_grad and torch.is_grad_enabled():
        return ["a gradient is asked for; call under torch.no_grad()"]
    return []
