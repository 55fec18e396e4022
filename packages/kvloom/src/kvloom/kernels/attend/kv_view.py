"""Keys or values as kernels read them: a packed prefix and an exact tail.

Decides the form of this view only; when tokens are packed is decided in `store`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...positions.rope import Rope


@dataclass(frozen=True, eq=False)
class Channelwise:
    """What a kernel needs of a layer's channels beside the format, the same for all tokens.

    group_of: int64 [Hk, D], the group of each channel among a token's scales (None: runs of
    consecutive channels). fixed: scale and zero fp32 [1, Hk, 1, D] of all tokens, which store none.
    divisor: fp32 [Hk, 1, D], by which a channel was divided before it was packed. rotated: so many
    consecutive channels were rotated together (see `quantize.rotated`).
    """

    group_of: Tensor | None = None
    fixed: tuple[Tensor, Tensor] | None = None
    divisor: Tensor | None = None
    rotated: int = 0

    @cached_property
    def by_layer(self) -> tuple[Tensor, Tensor]:
        """group_of as int32 [Hk, D], and where each head begins to count, int64 [Hk]: at 0."""
        assert self.group_of is not None
        begin = torch.zeros(len(self.group_of), dtype=torch.long, device=self.group_of.device)
        return self.group_of.int().contiguous(), begin

    @cached_property
    def by_head(self) -> tuple[Tensor, Tensor]:
        """The same, where each head counts from its first group."""
        assert self.group_of is not None
        first = self.group_of.amin(dim=1)
        return (self.group_of - first[:, None]).int().contiguous(), first.contiguous()

    @cached_property
    def multiplied(self) -> tuple[Tensor, Tensor]:
        """Fixed scale and zero times the divisor: fp32 [1, Hk, 1, D]."""
        assert self.fixed is not None
        times = 1.0 if self.divisor is None else self.divisor
        return (self.fixed[0] * times).contiguous(), (self.fixed[1] * times).contiguous()


class PackedPrefix(Protocol):
    """Packed tokens 0 to hi, in the layout of `kernels.quantize.reference`.

    codes: uint8 [B, Hk, rows, D]. scale, zero: [B, Hk, N/G, D] or [B, Hk, N, D/G], by map
    [B, 1, N, groups]. rope: set if keys are packed before RoPE; at: their positions, int64
    [B or 1, 1, hi], or [B or 1, 1, 1], that of the first token if the others follow it.
    """

    @property
    def codes(self) -> Tensor: ...  # noqa: D102
    @property
    def scale(self) -> Tensor: ...  # noqa: D102
    @property
    def zero(self) -> Tensor: ...  # noqa: D102
    @property
    def hi(self) -> int: ...  # noqa: D102
    @property
    def channelwise(self) -> Channelwise: ...  # noqa: D102
    @property
    def rope(self) -> Rope | None: ...  # noqa: D102
    @property
    def at(self) -> Tensor | None: ...  # noqa: D102
    def tensor(self) -> Tensor:
        """The tokens, unpacked: [B, Hk, hi, D]."""


class KVView(NamedTuple):
    """Keys or values: a packed prefix in a format, and the exact tokens behind it.

    packed is None while no token is packed; fmt is None if none ever will be. exact: [B, Hk, any,
    D], of which the `length` tokens from `first` on are those behind the prefix (None: all).
    """

    packed: PackedPrefix | None
    exact: Tensor
    fmt: Any = None
    first: int = 0
    length: int | None = None

    @property
    def tail(self) -> Tensor:
        """The exact tokens behind the prefix, [B, Hk, N, D]."""
        if self.length is None:
            return self.exact
        return self.exact[:, :, self.first : self.first + self.length]

    @property
    def tokens(self) -> int:
        """Tokens of both."""
        exact = self.exact.shape[2] if self.length is None else self.length
        return exact if self.packed is None else exact + self.packed.hi

    def tensor(self) -> Tensor:
        """All tokens [B, Hk, N, D], unpacked."""
        return self.tail if self.packed is None else torch.cat([self.packed.tensor(), self.tail], 2)
