"""The axis letters every docstring uses, and the geometry of a model's cache.

B batch, Hq query heads, Hk key/value heads, R = Hq / Hk, T tokens of this step, N stored tokens,
D head dimension, L layers, G group size of a quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Geometry:
    """What a cache must know of a model: layers, heads, head dimension, dtype, and ALiBi."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    alibi: bool = False

    def token_nbytes(self) -> int:
        """Bytes of one token's exact keys and values in all layers, batch 1."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize
