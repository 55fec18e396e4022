"""Decode attention to chosen tokens on CPU tensors: which cases the kernels cover, and their call.

Tokens are read where they are stored, dense or packed; nothing is gathered into memory first.
`gathered_kernel` does it, `coverage` names the formats. Importing this does not import Numba.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...arguments import strides
from ..kv_view import KVView
from ..reference import First, State
from . import coverage
from .arguments import GATHERED
from .layer import KernelAttention


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel reads chosen tokens of these formats for so many queries a step.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    found = list(coverage.problems(like.shape[-1], like.shape[1], like.dtype, keys, values))
    if like.device.type != "cpu":
        found.append(f"the tensors are on {like.device.type}")
    if keys is not None and not found and keys.boost:
        found.append(f"keys: boost={keys.boost} is not read token by token")
    for side, fmt in (("keys", keys), ("values", values)):
        if fmt is not None and not found and fmt.balance:
            found.append(f"{side}: balance={fmt.balance} is not read token by token")
    if tokens != 1:
        found.append(f"{tokens} queries a step are not one")
    return found


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
        visible: Tensor | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
    ) -> State:
        """Attend as `attend` does."""
        h, m = slots.shape[1:]
        s = 0 if first is None else first[0].shape[2]
        slots = slots if slots.stride(2) == 1 else slots.contiguous()
        lead = [None if x is None else _rows(x) for x in first or (None, None)]
        return self._layer.run(
            q, keys, values, s + m + keys.tokens - begin, scale, visible, softcap, bias, False,
            causal=False, share=h // keys.exact.shape[1], first_tokens=s, slots_count=m,
            begin=begin, slots=strides(slots, 2), first_keys=strides(lead[0], 3),
            first_values=strides(lead[1], 3),
        )  # fmt: skip


def attend(
    q: Tensor,
    keys: KVView,
    values: KVView,
    slots: Tensor,
    begin: int,
    scale: float,
    **options: Any,
) -> State:
    """Attend as `reference.attend_gathered` does, with its options, without gathering.

    Packed tokens are not rounded to the dtype of the exact ones.
    """
    return Gathered(q, keys, values, slots)(q, keys, values, slots, begin, scale, **options)


def _rows(x: Tensor) -> Tensor:
    """Return x with contiguous channels."""
    return x if x.stride(3) == 1 else x.contiguous()
