"""The operation `attend_prompt`: attention of many queries to exact tokens.

`ops` lists it with the others. It is here because a backend of `ops.attend` runs it, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from ..dispatch import Backend, Binding, Op, differentiated
from . import reference
from .cpu import prompt as prompt_cpu


def _case(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Hashable]:
    dims = q.shape[3], k.shape[3], v.shape[3]
    return q, (dims, q.dtype, k.dtype, v.dtype, differentiated(q))


attend_prompt = Op(
    "attend_prompt",
    reference.attend_prompt,
    _case,
    cpu=Backend(Binding(prompt_cpu.attend, prompt_cpu.compiled), prompt_cpu.COVERAGE),
)
