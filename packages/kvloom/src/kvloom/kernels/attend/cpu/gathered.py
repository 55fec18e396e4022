"""Decode attention to chosen tokens on CPU tensors: which cases the kernels cover, and their call.

Tokens are read where they are stored, dense or packed; nothing is gathered into memory first.
`gathered_kernel` does it, `coverage` names the formats. Importing this does not import Numba.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...arguments import contiguous_rows, strides
from ...dispatch import once
from ...quantize.encoding import Encoding
from ..kv_view import KVView
from ..reference import First, State
from . import coverage
from .arguments import GATHERED
from .layer import KernelAttention


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel reads chosen tokens of these formats for so many queries a step.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    return coverage.step_problems(1, tokens, like, (keys, values), _refuse)


def _refuse(how: Encoding | None) -> list[str]:
    if how is None:
        return []
    found = {"boost": how.boost, "balance": how.balance}
    return [f"{name}={size} is not read token by token" for name, size in found.items() if size]


class Gathered:
    """Attention of one layer to chosen tokens: keeps what does not change between its steps."""

    def __init__(self, q: Tensor, keys: KVView, values: KVView, slots: Tensor) -> None:
        self._layer = KernelAttention(q, keys, values, slots.shape[1], GATHERED)

    def __call__(
        self,
        q: Tensor,
        keys: KVView,
        values: KVView,
        slots: Tensor,
        begin: int,
        scale: float,
        *,
        first: First | None = None,
        **options: Any,
    ) -> State:
        """Attend as `reference.attend_gathered` does, with its options, without gathering.

        Packed tokens are not rounded to the dtype of the exact ones.
        """
        h, m = slots.shape[1:]
        s = 0 if first is None else first[0].shape[2]
        slots = contiguous_rows(slots)
        lead = [None if x is None else contiguous_rows(x) for x in first or (None, None)]
        return self._layer.run(
            q, keys, values, s + m + keys.tokens - begin, scale, **options,
            share=h // keys.exact.shape[1], first_tokens=s, slots_count=m, begin=begin,
            slots=strides(slots, 2), first_keys=strides(lead[0], 3),
            first_values=strides(lead[1], 3),
        )  # fmt: skip


attend = once(Gathered)
