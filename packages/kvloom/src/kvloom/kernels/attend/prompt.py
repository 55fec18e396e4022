"""The operation `attend_prompt`: attention of many queries to exact tokens, and its log-sum-exp.

`ops` lists it with the others; it is here because kernels of other operations call it, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Backend, Binding, Op, differentiated
from . import reference
from .cpu import prompt as cpu
from .reference import AttentionState
from .triton import prompt as triton


def _case(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Hashable]:
    gradient = differentiated(q) or differentiated(k) or differentiated(v)
    return q, (reference.unfit_prompt(q, k, v, **options), q.shape[3], q.dtype, gradient)


attend_prompt = Op(
    "attend_prompt",
    reference.attend_prompt,
    _case,
    cpu=Backend(cpu.bind, cpu.COVERAGE),
    gpu=Backend(Binding(triton.attend, triton.kernels), triton.COVERAGE),
)


def attend_tokens(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    causal: bool,
    visible: Tensor | None = None,
) -> AttentionState:
    """Attend as `attend_prompt` does, with out in fp32, which `merge` needs."""
    out, lse, _ = attend_prompt(q, k, v, scale, causal=causal, visible=visible)
    return AttentionState(out.float(), lse)
