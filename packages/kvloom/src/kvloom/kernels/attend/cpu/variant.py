"""What an attention kernel is compiled for: the constants in its code.

Decides nothing about the order of steps. Importing this imports Numba.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...simd import SIZE
from .dequant import CHANNEL, MAP, RUN, TABLE, DequantSpec
from .lookup import by_table


class Variant(NamedTuple):
    """What an attention kernel is compiled for: constants in its code."""

    d: int
    w: int  # query rows at once
    exact: int  # number format of the tails
    keys: DequantSpec = DequantSpec()  # of the packed prefixes
    values: DequantSpec = DequantSpec()
    meta: tuple[int, int] = (0, 0)  # number formats of scale and zero
    span: tuple[int, int] = (0, 0)  # tokens that share metadata, 0: per token, or all if static
    flat: tuple[bool, bool] = (True, True)  # for MAP: whether a head reads all of a token's groups
    apart: tuple[bool, bool] = (False, False)  # packed: queries of their own, sums of their own
    boost: int = 0  # channels of a group of keys that have two more bits
    balance: tuple[bool, bool] = (False, False)  # a span is a tile with factors of tokens (keys),
    # of channels (values)
    page: int = 0  # tokens of a page, 0: each batch row's packed tokens lie together
    lead: bool = False  # exact tokens stand before the others
    spans: bool = False  # tokens of which heads have different numbers stand behind them

    @property
    def tile(self) -> int:
        """Tokens of a tile, at least 128: pack blocks and groups end with it."""
        unit = math.lcm(
            16, self.keys.per_block[0], self.values.per_block[0], *filter(None, self.span)
        )
        return unit * -(-128 // unit)

    def form(self, side: int) -> SideForm:
        """Return the constants of packed keys (0) or values (1)."""
        spec = by_table((self.keys, self.values)[side])
        grouped, balanced = spec.by in (MAP, TABLE), self.balance[side]
        flat = spec.by == RUN or (grouped and self.flat[side])
        return SideForm(
            spec,
            self.meta[side],
            self.span[side] or self.tile,
            joint=flat and not (balanced and side == 1),
            strewn=grouped and not flat,
            balanced=balanced,
        )

    @property
    def scales_gap(self) -> int:
        """Bytes of the S of a tile: from S to Z."""
        across = max(self.keys.across, self.values.across, 1)
        return 4 * (across * (self.tile + 8) + self.d + 256) // 64 * 64

    @property
    def logits_row(self) -> int:
        """Bytes of a row of a tile's logits."""
        return 4 * (self.tile + 16)


class SideForm(NamedTuple):
    """The constants of packed keys or values in a kernel that reads them tile by tile."""

    spec: DequantSpec
    meta: int  # number format of scale and zero
    span: int  # tokens that share metadata, else those of a tile
    joint: bool  # per token: a head reads all scales of a row, so those of a tile are adjacent
    strewn: bool  # per token: those of a head are among others
    balanced: bool

    @property
    def folds(self) -> bool:
        """Whether S of the keys is multiplied into the query: per channel, packed after RoPE."""
        return self.spec.by == CHANNEL and not self.spec.rope_dims

    @property
    def size(self) -> int:
        """Bytes of a scale."""
        return SIZE[self.meta]

    @property
    def in_groups(self) -> int:
        """The same if a head's scales begin at its first group, else 0: see `head_view`."""
        return self.size if self.spec.by in (MAP, TABLE) else 0

    @property
    def per_row(self) -> int:
        """Tokens of a row of scales."""
        return self.span if self.spec.by == CHANNEL or self.balanced else 1
