"""Decode attention on CPU tensors: which cases the compiled kernels cover, and their call.

A step of few queries attends to a packed prefix and an exact tail in one pass; `decode_kernel` does
it, `coverage` names the formats. Importing this does not import Numba; the first call does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...dispatch import once
from ..kv_view import KVView
from ..reference import State
from . import coverage
from .arguments import DECODE
from .layer import KernelAttention

MAX_QUERIES = 8  # per step: with more, reading keys no longer dominates


def problems(tokens: int, like: Tensor, keys: Any = None, values: Any = None) -> list[str]:
    """Return why no kernel attends so many queries a step to tokens in these formats.

    like: exact keys [B, Hk, N, D]. keys, values: formats of packed tokens, or None.
    """
    return coverage.step_problems(MAX_QUERIES, tokens, like, (keys, values))


class Decode:
    """Decode attention of one layer: keeps what does not change between its steps."""

    def __init__(self, q: Tensor, keys: KVView, values: KVView) -> None:
        self._layer = KernelAttention(q, keys, values, keys.exact.shape[1], DECODE)

    def __call__(
        self, q: Tensor, keys: KVView, values: KVView, scale: float, **options: Any
    ) -> State:
        """Attend q [B, Hq, T, D] as `reference.attend` does to the N tokens of two views.

        Packed tokens are not rounded to the dtype of the exact ones. options: as in
        `reference.attend_views`; with `products`, the kernel returns them.
        """
        packed = keys.packed
        if packed is not None and packed.at is not None:
            assert packed.at.shape[2] == 1, "positions must not have gaps"
        return self._layer.run(q, keys, values, keys.tokens, scale, **options)


attend = once(Decode)
