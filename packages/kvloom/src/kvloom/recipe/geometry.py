"""The axis letters that every docstring uses, and the geometry of a model's cache.

B batch, Hq query heads, Hk key/value heads, R = Hq / Hk, T tokens of this step, N stored tokens,
D head dimension, L layers, G group size of a quantizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Geometry:
    """The layers, heads, head dimension and dtype of a model.

    Attributes:
        layers: How many layers kvloom caches.
        q_heads: Query heads of a layer (Hq).
        kv_heads: Key/value heads of a layer (Hk).
        head_dim: Channels of a head (D): of keys, and of values unless these differ.
        dtype: The dtype of exact keys and values.
        alibi: Whether the model has ALiBi.
        cached: The model's indices of these layers, ascending; None: 0 to layers - 1.
        rank: Under tensor parallelism, the heads are this part of the model's.
        ranks: The number of these equal parts.
        value_dim: Channels of a value; None: `head_dim`.
        latent: Whether layers store latents (MLA): the key is the positional part that all heads
            share, the value is the latent.
        sliding: The layers with a sliding window, which are not among `layers`.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    alibi: bool = False
    cached: tuple[int, ...] | None = None
    rank: int = 0
    ranks: int = 1
    value_dim: int | None = None
    latent: bool = False
    sliding: tuple[SlidingLayer, ...] = ()

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    @property
    def query_dim(self) -> int:
        """Channels of a query; over latents, of an absorbed one."""
        return sum(self.dims) if self.latent else self.head_dim

    @property
    def layer_indices(self) -> Sequence[int]:
        """The model's indices of the layers that kvloom caches."""
        return range(self.layers) if self.cached is None else self.cached

    @property
    def first_head(self) -> int:
        """The model's index of the first key/value head."""
        return self.rank * self.kv_heads

    def token_nbytes(self) -> int:
        """Return the bytes of one token's exact keys and values in all layers, batch 1."""
        return self.layers * self.layer_token_nbytes()

    def layer_token_nbytes(self) -> int:
        """Return the bytes of one token's exact keys and values in one layer, batch 1."""
        return self.kv_heads * sum(self.dims) * self.dtype.itemsize


@dataclass(frozen=True)
class SlidingLayer:
    """A layer with a sliding window, in which a token attends to the newest `window` tokens.

    Attributes:
        layer_index: Its index in the model.
        window: In tokens, the token itself included.
        geometry: Of this layer alone.
        problem: Why kvloom cannot pack it; empty: it can.
    """

    layer_index: int
    window: int
    geometry: Geometry
    problem: str = ""
