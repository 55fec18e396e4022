"""Kitty: 2-bit KV cache quantization with dynamic channel-wise precision boost (arXiv:2511.18643).

Keys are quantized per channel as by KIVI, but `boost` channels of each group of tokens of a head
have 4 bits and all others 2. Values have 2 bits per token. The first tokens stay exact.

Departures: the channels with the largest range are boosted, as their error is the largest. Keys
gather until `residual` of them are exact; the newest `residual` values are exact, as in `kivi`.
With `rotate`, values are rotated and rounded as by `turbo`, which the paper does not do.
"""

from __future__ import annotations

from ...store import Packed, Store
from ..spec import Protect, Recipe


def kitty(
    boost: int = 16,
    group: int = 64,
    residual: int = 128,
    sinks: int = 32,
    meta: str = "fp16",
    rotate: bool = False,
) -> Recipe:
    """Kitty (arXiv:2511.18643): keys per channel, a few at 4 bits, all else 2 bits."""
    values = Packed(2, "token", 32, meta)
    if rotate:
        values = Packed(2, "token", 0, meta, rotation="group")
    return Recipe(
        store=Store(
            keys=Packed(2, "channel", group, meta, residual=residual, boost=boost), values=values
        ),
        protect=Protect(sinks, (0, residual)),
    )
