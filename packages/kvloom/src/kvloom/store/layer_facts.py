"""What a layer needs of its model before its first token."""

from __future__ import annotations

from typing import NamedTuple

from ..encoding import LayerEncoding
from ..positions.rope import Rope


class LayerFacts(NamedTuple):
    """What a layer needs of its model before its first token.

    Attributes:
        keys: Their calibrated encoding; None without one.
        values: Likewise.
        rope: The model's rotary embedding, for keys that are packed before RoPE.
        head: The model's number of the first key/value head, where this process holds a part of
            them.
        value_dim: Channels of a value; None where keys have as many.
        latent: Whether the layer stores latents (MLA): the positional part of keys as keys, and
            latents as values.
    """

    keys: LayerEncoding | None = None
    values: LayerEncoding | None = None
    rope: Rope | None = None
    head: int = 0
    value_dim: int | None = None
    latent: bool = False
