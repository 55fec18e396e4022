"""What a layer needs of its model before its first token."""

from __future__ import annotations

from typing import NamedTuple

from ..encoding import LayerEncoding
from ..positions.rope import Rope


class LayerFacts(NamedTuple):
    """Calibrated encodings of a layer's keys and values, and the rope.

    head: the model's number of the first key/value head, where this process holds a part of them.
    value_dim: channels of a value, None where keys have as many. latent: whether the layer stores
    latents (MLA): the positional part of keys as keys, and latents as values.
    """

    keys: LayerEncoding | None = None
    values: LayerEncoding | None = None
    rope: Rope | None = None
    head: int = 0
    value_dim: int | None = None
    latent: bool = False
