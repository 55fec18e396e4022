"""How tokens become codes: what a kernel has to know of a format and of a layer's channels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scheme:
    """What shares a scale, and how it is found and stored.

    axis: "channel" for groups of `group` tokens of one channel, "token" for groups of `group`
    channels of one token. group_of: int64 [Hk, D], the group of each channel of a token instead,
    of all heads together; then clip: alpha, one or one a group, and divisor: fp32 [Hk, D], what
    channels are divided by before. static: scale and zero fp32 [1, Hk, 1, D] that are given and not
    stored. rotated: see `rotated`.
    """

    bits: float
    axis: str
    group: int
    meta: torch.dtype
    group_of: Tensor | None = None
    clip: Tensor | float = 1.0
    divisor: Tensor | None = None
    static: tuple[Tensor, Tensor] | None = None
    rotated: bool = False
    made: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What a backend has made of it, addresses perhaps: a copy makes its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": {}}

    @property
    def stretch(self) -> int:
        """Tokens that share a scale."""
        return self.group if self.axis == "channel" else 1

    def scales(self, heads: int, d: int) -> tuple[int, int]:
        """Rows, and numbers in each, of the scales (and zeros) of `heads` heads for one stretch."""
        if self.static is not None:
            return 1, 0
        if self.group_of is not None:
            return 1, int(self.group_of.max()) + 1
        return heads, d if self.axis == "channel" else d // self.group


class Held(NamedTuple):
    """Where packed tokens lie, or will: token 0 first.

    codes: uint8 [B, Hk, rows, D]. scale, zero: [B, Hk, N/G, D], [B, Hk, N, D/G] or, with groups of
    all heads, [B, 1, N, groups]; fp8 as bytes or as numbers. Rotated groups have no zeros.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor


class Turn(NamedTuple):
    """How tokens are turned before they are packed, or after they are unpacked (see `rope`).

    cos, sin: fp32 [B or 1, Hk or 1, N, dims / 2]; (a, b) becomes (a cos - b sin, b cos + a sin),
    where a pair is channels (2i, 2i + 1) if interleaved, else (i, i + dims / 2).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
