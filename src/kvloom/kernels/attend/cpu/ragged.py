"""Decode attention of heads with different numbers of tokens on CPU tensors.

Decides which cases are covered, and makes the call; `decode_kernel` does it, `coverage` names the
formats. Importing this does not import Numba.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kv_view import KVView
from ..ragged import Spans
from ..reference import State
from . import decode
from .arguments import RAGGED
from .layer import KernelAttention


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [1, 1, M, D]. keys, values: formats of packed tokens, or None.
    """
    found = decode.problems(tokens, like, keys, values)
    for side, fmt in (("keys", keys), ("values", values)):
        if fmt is None:
            continue
        if fmt.pre_rope:
            found.append(f"{side}: it does not read keys before RoPE by spans")
        if fmt.transform is not None and not (fmt.transform.rotate or fmt.transform.hadamard):
            found.append(f"{side}: channels of a layer's heads that are grouped or scaled together")
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
        *,
        visible: Tensor | None = None,
        softcap: float | None = None,
    ) -> State:
        """Attend as `attend` does."""
        bounds = spans.bounds.contiguous()
        return self._layer.run(
            q, keys, values, spans.longest, scale, visible, softcap, None, False, causal=0,
            spans=bounds.data_ptr(),
        )  # fmt: skip


def attend(
    q: Tensor, keys: KVView, values: KVView, spans: Spans, scale: float, **options: Any
) -> State:
    """Attend q [B, Hq, T, D] as `attend_ragged` does; packed tokens are not rounded."""
    return Ragged(q, keys, values, spans)(q, keys, values, spans, scale, **options)
