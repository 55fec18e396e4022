"""What an attention kernel is compiled for: the constants in its code, which follow from encodings.

Decides nothing about the order of steps. Importing this imports Numba.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ....encoding import PACK_BLOCK, Encoding
from ...arguments import META_CODES
from ...simd import SIZE

# What has an S and a Z of its own: nothing (exact, or folded into the query); a channel, for all
# tokens of a tile; a run of a token's channels; a group of a token's channels, found by each
# channel's group number (MAP) or by a table of all numbers, where these are few (TABLE, `lookup`).
NONE, CHANNEL, RUN, MAP, TABLE = range(5)


class SideConstants(NamedTuple):
    """What compiled code knows of keys or values; `literal` is all of it in one integer."""

    bits_x2: int = 0  # twice the bits of a code, 0: nothing is packed
    exact_dtype: int = 0  # dtype code of exact tokens, where these are read
    by: int = NONE
    group: int = 0  # channels of a run
    across: int = 0  # S of one token that a head reads, for RUN and MAP
    levels: int = 0  # 1: codes are levels
    rope_dims: int = 0  # rotary channels of keys packed before RoPE
    interleaved: int = 0
    meta: int = 0  # dtype code of scale and zero
    tokens_per_scale: int = 0  # 0: one token, or all if the scale is static
    adjacent: int = 1  # for RUN and MAP: the scales that a head reads of a tile lie together
    own_space: int = 0  # packed tokens need queries, and sums, of their own: divided or rotated

    @classmethod
    def of(
        cls, encoding: Encoding, heads: int, d: int, rope: tuple[int, bool] = (0, False)
    ) -> SideConstants:
        """Return the constants of an encoding; rope: rotary channels, whether interleaved."""
        static, by_channel = encoding.static, encoding.axis == "channel"
        constants = cls(
            int(2 * encoding.bits),
            rope_dims=rope[0],
            interleaved=int(rope[1]),
            meta=0 if static else META_CODES[encoding.meta],
            tokens_per_scale=encoding.group if by_channel else 0,
            own_space=int(encoding.own_space),
        )
        if by_channel or static:
            return constants._replace(by=CHANNEL)
        width = encoding.groups_read(heads, d)
        if encoding.regroups:
            return constants._replace(by=MAP, across=width, adjacent=int(encoding.span == "layer"))
        return constants._replace(
            by=RUN, across=width, group=encoding.group or d,
            levels=int(encoding.rotation == "group"),
        )  # fmt: skip

    @property
    def bits(self) -> float:
        """Bits of a code."""
        return self.bits_x2 / 2

    @property
    def per_block(self) -> tuple[int, int]:
        """Tokens of a pack block, and its byte rows."""
        return PACK_BLOCK[self.bits] if self.bits_x2 else (1, 1)

    @property
    def factor(self) -> float:
        """S / scale."""
        return 1.0 if self.levels or self.by == TABLE or self.bits < 2 else 2.0**self.bits

    @property
    def offset(self) -> float:
        """(Z - zero) / S."""
        return 0.0 if self.by == TABLE or self.bits < 2 else -1.0

    @property
    def per_token(self) -> bool:
        """Whether each token has scales of its own."""
        return self.by in (RUN, MAP, TABLE)

    @property
    def folds(self) -> bool:
        """Whether S of the keys is multiplied into the query: per channel, packed after RoPE."""
        return self.by == CHANNEL and not self.rope_dims

    @property
    def meta_size(self) -> int:
        """Bytes of a scale."""
        return SIZE[self.meta]

    @property
    def first_group_size(self) -> int:
        """Bytes of a scale if a head's scales begin at its first group, else 0: see `head_view`."""
        return self.meta_size if self.by in (MAP, TABLE) else 0

    @property
    def literal(self) -> int:
        """All fields in one integer: Numba passes integers to intrinsics as literals."""
        bits = 0
        for field, width in zip(self, _WIDTHS, strict=True):
            assert 0 <= field < 1 << width
            bits = bits << width | field
        return bits


_WIDTHS = (5, 2, 3, 10, 10, 1, 10, 1, 2, 8, 1, 1)


def from_literal(bits: int) -> SideConstants:
    """Invert `SideConstants.literal`."""
    constants = []
    for width in reversed(_WIDTHS):
        constants.append(bits & ((1 << width) - 1))
        bits >>= width
    return SideConstants(*reversed(constants))


class Variant(NamedTuple):
    """What an attention kernel is compiled for: constants in its code."""

    d: int
    w: int  # query rows at once
    exact_dtype: int  # dtype code of exact tokens
    keys: SideConstants = SideConstants()  # of the packed prefixes
    values: SideConstants = SideConstants()
    page: int = 0  # tokens of a page, 0: each batch row's packed tokens lie together
    lead: bool = False  # exact tokens stand before the others
    spans: bool = False  # tokens of which heads have different numbers stand after them

    @property
    def sides(self) -> tuple[SideConstants, SideConstants]:
        """Keys and values."""
        return self.keys, self.values

    @property
    def tile(self) -> int:
        """Tokens of a tile, at least 128: pack blocks and groups end with it."""
        spans = (side.tokens_per_scale or 1 for side in self.sides)
        unit = math.lcm(16, *(side.per_block[0] for side in self.sides), *spans)
        return unit * -(-128 // unit)

    def tokens_at_once(self, side: SideConstants) -> int:
        """Return the tokens that are read together: those that share metadata, else a tile."""
        return side.tokens_per_scale or self.tile

    @property
    def z_offset(self) -> int:
        """Bytes of the S of a tile: from S to Z."""
        across = max(self.keys.across, self.values.across, 1)
        return 4 * (across * (self.tile + 8) + self.d + 256) // 64 * 64

    @property
    def logits_row(self) -> int:
        """Bytes of a row of a tile's logits."""
        return 4 * (self.tile + 16)
