"""New positions for kept tokens, as if the evicted ones had never existed.

Decides by how much each key is rotated again; `Rope` rotates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rope import Rope


def renumber(rope: Rope, k: Tensor, index: Tensor, newest: int) -> Tensor:
    """Rotate keys k [B, Hk, N, D] to consecutive positions that end at `newest`.

    index: the tokens' logical indices, and positions so far, [B or 1, Hk or 1, N].
    """
    rank = index.argsort(dim=-1).argsort(dim=-1)
    return rope.rotate(k, newest + 1 - index.shape[-1] + rank - index)


def renumber_once(rope: Rope, k: Tensor, slots: Tensor, tokens: int) -> Tensor:
    """Rotate keys k [B, Hk, M, D], kept at slots [B, Hk, M] of `tokens` tokens, to the last M."""
    m = slots.shape[-1]
    return rope.rotate(k, torch.arange(tokens - m, tokens, device=k.device) - slots)
