"""KVarN: variance-normalized KV cache quantization (arXiv:2606.03458).

Each head is rotated by a Hadamard matrix. A tile of `group` tokens of a head is then divided by the
standard deviations of its tokens and of its channels in turns, 16 times, and the turn is kept after
which they differ least. Keys are quantized by range per channel, values per token.

Departures: the rotation has random signs, as in `turbo`. What a token is divided by is limited
relative to the size of its tile, where the authors' code has absolute limits, so a tile of small
numbers is normalized as one of large ones. A side stores the factors of one axis, as those of the
other only scale its ranges. Codes are computed with the stored, rounded numbers. Padding enters no
deviation.
"""

from __future__ import annotations

from ...store import Packed, Store
from ..spec import Protect, Recipe


def kvarn(
    bits: int | float = 2,
    value_bits: int | float = 0,
    group: int = 128,
    residual: int = 128,
    sinks: int = 4,
    meta: str = "fp16",
) -> Recipe:
    """KVarN (arXiv:2606.03458): rotated tiles, normalized over tokens and channels.

    value_bits: 0 is as many as `bits`.
    """
    return Recipe(
        store=Store(
            keys=Packed(
                bits, "channel", group, meta, residual=residual, rotation="head", balance=group
            ),
            values=Packed(
                value_bits or bits,
                "token",
                0,
                meta,
                residual=residual,
                rotation="head",
                balance=group,
            ),
        ),
        protect=Protect(sinks),
        name="kvarn",
    )
