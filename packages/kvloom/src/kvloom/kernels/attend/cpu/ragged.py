"""Decode attention of heads with different numbers of tokens on CPU tensors.

Decides which cases are covered, and makes the call; `decode_kernel` does it, `coverage` names the
formats. Importing this does not import Numba.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch import once
from ...quantize.encoding import Encoding
from ..kv_view import KVView
from ..ragged import Spans
from ..reference import State
from . import coverage, decode
from .arguments import RAGGED
from .layer import KernelAttention


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [1, 1, M, D]. keys, values: formats of packed tokens, or None.
    """
    return coverage.step_problems(decode.MAX_QUERIES, tokens, like, (keys, values), _refuse)


def _refuse(how: Encoding | None) -> list[str]:
    found = []
    if how is not None and how.pre_rope:
        found.append("it does not read keys before RoPE by spans")
    if how is not None and how.regroups:
        found.append("channels of a layer's heads that are grouped or scaled together")
    return found


class Ragged:
    """Attention of one layer by spans: keeps what does not change between its steps."""

    def __init__(self, q: Tensor, keys: KVView, values: KVView, spans: Spans) -> None:
        self._layer = KernelAttention(q, keys, values, spans.bounds.shape[1], RAGGED)

    def __call__(
        self,
        q: Tensor,
        keys: KVView,
        values: KVView,
        spans: Spans,
        scale: float,
        **options: Any,
    ) -> State:
        """Attend q [B, Hq, T, D] as `attend_ragged` does; packed tokens are not rounded."""
        bounds = spans.bounds.contiguous()
        return self._layer.run(
            q, keys, values, spans.longest, scale, **options, spans=bounds.data_ptr()
        )


attend = once(Ragged)
