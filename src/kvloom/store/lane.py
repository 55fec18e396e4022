"""Keys or values of a segment: a packed prefix followed by an exact tail.

Decides when tokens move from the tail into the packed prefix; knows nothing of attention.

KIVI's two schedules are the two ends of one rule. Of N tokens, floor((N - recent) / residual) *
residual are packed. Keys: recent 0, residual R (R exact tokens are gathered and packed whole).
Values: recent R, residual 1 (a queue of R exact tokens). The rule counts from the first token, so
it does not depend on how a prompt was cut into chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.attend.kv_view import KVView
from ..positions.rope import Rope
from .buffer import Buffer
from .codec import Channels
from .formats import Packed
from .packed import PackedTokens, PackedView

Positions = Callable[[int, int], Tensor]
"""The positions of tokens lo..hi of a lane, int64 [B or 1, Hk or 1, hi - lo]."""

Part = Tensor | Sequence[Tensor]
"""Tokens [B, Hk, T, D]: exact, or their codes, scales and zeros as they are held."""


class Lane:
    """One of the two streams (keys, values) of a segment."""

    def __init__(
        self,
        fmt: Packed | None,
        recent: int,
        channels: Channels | None = None,
        rope: Rope | None = None,
    ) -> None:
        self.packed = None if fmt is None else PackedTokens(fmt, channels, rope)
        self.recent = recent
        blocks = 0 if fmt is None or not fmt.in_blocks else fmt.residual
        self.tail = Buffer(most=recent + blocks if blocks else 0)

    def __len__(self) -> int:
        return self.sealed + len(self.tail)

    @property
    def sealed(self) -> int:
        """Tokens in the packed prefix."""
        return 0 if self.packed is None else len(self.packed)

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes."""
        return [self.tail] if self.packed is None else [self.tail, *self.packed.parts]

    @property
    def placed(self) -> bool:
        """Whether what is packed depends on where it stands."""
        return self.packed is not None and self.packed.rope is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        return self.tail.nbytes + (0 if self.packed is None else self.packed.nbytes)

    def take(
        self, x: Tensor, drop: int, real: Tensor | None = None, at: Positions | None = None
    ) -> None:
        """Add x, forget the `drop` oldest tokens, seal: a long x never enters the tail whole.

        real: bool [B, 1 or Hk, N] of all tokens of the lane and x, False for padding. at: the
        positions of any stretch of them, asked where keys are packed as before RoPE.
        """
        begin = self.sealed
        exact = x if len(self.tail) == 0 else torch.cat([self.tail.view(), x], dim=2)
        surplus = drop + self._surplus(exact.shape[2] - drop, prompt=True)
        if surplus and self.packed is not None:
            here = None if real is None else real[:, :, begin + drop : begin + surplus]
            there = at(begin + drop, begin + surplus) if at and self.placed else None
            self.packed.append(exact[:, :, drop:surplus], here, there)
        self.tail.replace(exact[:, :, surplus:])

    def seal(
        self, real: Tensor | None = None, prompt: bool = False, at: Positions | None = None
    ) -> None:
        """Pack what the schedule no longer keeps exact; real and at as in `take`.

        prompt: the tail holds a prompt, which is packed at once.
        """
        if self.packed is None:
            return
        surplus = self._surplus(len(self.tail), prompt)
        if surplus:
            here = None if real is None else real[:, :, self.sealed : self.sealed + surplus]
            begin = self.sealed
            there = at(begin, begin + surplus) if at and self.placed else None
            self.packed.append(self.tail.view(surplus), here, there)
            self.tail.drop_front(surplus)

    def view(self, lo: int, hi: int, at: Positions | None = None) -> Tensor | PackedView:
        """Tokens lo..hi, which must not cross the end of the packed prefix; at as in `take`."""
        if hi <= self.sealed:
            assert self.packed is not None
            return self.packed.view(lo, hi, at(lo, hi) if at and self.placed else None)
        return self.tail.view()[:, :, lo - self.sealed : hi - self.sealed]

    def give(self, n: int) -> Part:
        """Give the n oldest tokens away: all packed (whole groups), or none in an exact lane."""
        if self.packed is not None:
            return self.packed.give(n)
        x = self.tail.view()
        self.tail.replace(x[:, :, n:])
        return x[:, :, :n]

    def take_back(self, part: Part, n: int) -> None:
        """Put n tokens back in front, as `give` gave them."""
        if self.packed is None:
            assert isinstance(part, Tensor)
            self.tail.replace(torch.cat([part, self.tail.view()], dim=2))
        else:
            assert not isinstance(part, Tensor)
            self.packed.take_back(part, n)

    def wrap(self, part: Part, n: int) -> Tensor | PackedView:
        """See n tokens that `give` gave as `view` shows those that lie here."""
        if isinstance(part, Tensor):
            return part
        assert self.packed is not None
        return self.packed.wrap(part, 0, n)

    def whole(self, at: Positions | None = None, gaps: bool = False) -> KVView:
        """All tokens, as kernels see them that take packed and exact ones together.

        at: as in `take`. gaps: not every token stands one behind the one before.
        """
        if self.packed is None:
            return KVView(None, self.tail.view())
        there = None
        if at and self.placed and self.sealed:
            there = at(0, self.sealed if gaps else 1)
        packed = self.packed.view(at=there) if self.sealed else None
        return KVView(packed, self.tail.view(), self.packed.fmt)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        self.tail.map(fn)
        if self.packed is not None:
            self.packed.map(fn)

    def _surplus(self, tokens: int, prompt: bool) -> int:
        """How many of the `tokens` exact tokens are to be packed."""
        if self.packed is None:
            return 0
        return self.packed.fmt.to_pack(tokens, self.recent, prompt)
