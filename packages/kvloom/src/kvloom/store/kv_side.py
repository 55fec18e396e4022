"""Keys or values of a segment: a packed prefix followed by an exact tail.

Decides when tokens move from the tail into the packed prefix; does not compute attention.

KIVI's two schedules are special cases of one rule. Of N tokens, floor((N - recent) / residual) *
residual are packed. Keys: recent 0, residual R (R exact tokens are gathered and packed whole).
Values: recent R, residual 1 (a queue of R exact tokens). The rule counts from the first token, so
the division of a text into steps does not matter. A format with a `unit` below its residual packs
whole units of the first prompt and counts from there, so the length of that prompt matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..encoding import LayerEncoding
from ..kernels.attend.regions import KVView
from ..positions.rope import Rope
from ..state import Stateful
from .buffer import Buffer, take_units
from .format_tokens import FormatTokens
from .formats import Format, Packed
from .packed import PackedTokens
from .prefix import PackedPrefix

Positions = Callable[[int, int], Tensor]
"""Returns the positions of tokens lo..hi of a side, int64 [B or 1, Hk or 1, hi - lo]."""


class KVSide(Stateful):
    """The keys, or the values, of a segment.

    recent: the number of newest tokens that always stay exact. calibrated, rope: as for
    `PackedTokens`.
    """

    children = ("tail", "packed")
    fixed = True

    def __init__(
        self,
        fmt: Format | None = None,
        recent: int = 0,
        calibrated: LayerEncoding | None = None,
        rope: Rope | None = None,
    ) -> None:
        self.packed: PackedPrefix | None = None
        gathered = 0  # a tail that is packed rarely has room for the tokens that gather
        if isinstance(fmt, Packed):
            self.packed = PackedTokens(fmt, calibrated, rope)
            gathered = fmt.residual if fmt.packs_rarely else 0
        elif fmt is not None:
            self.packed = FormatTokens(fmt)
        self.recent = recent
        self.needs_positions = self.packed is not None and self.packed.rope is not None
        """Whether packing depends on the tokens' positions."""
        self.tail = Buffer(most=recent + gathered if gathered else 0)

    def __len__(self) -> int:
        return self.packed_count + len(self.tail)

    @property
    def packed_count(self) -> int:
        """Tokens in the packed prefix."""
        return 0 if self.packed is None else self.packed.count

    def extend(
        self,
        x: Tensor,
        drop: int,
        nonpadding: Tensor | None = None,
        positions: Positions | None = None,
        prompt: bool = False,
    ) -> None:
        """Add x [B, Hk, T, D], drop the `drop` oldest tokens, and pack what is due.

        Of packed tokens whole groups are dropped. The packed part of x never enters the tail.
        nonpadding: bool [B, 1 or Hk, N] of all tokens of this side and of x, False for padding.
        positions: returns their positions, to pack keys before RoPE. prompt: see `Format.to_pack`.
        """
        begin = self.packed_count
        drop -= self._drop_packed(drop)
        exact = x if len(self.tail) == 0 else torch.cat([self.tail.view(), x], dim=2)
        exact = exact[:, :, drop:]
        packed, n = self.packed, exact.shape[2]
        due = 0 if packed is None else packed.fmt.to_pack(n, self.recent, prompt)
        if due:
            self._pack(exact[:, :, :due], begin + drop, nonpadding, positions)
        self.tail.replace(exact[:, :, due:])

    def drop_front(self, n: int) -> None:
        """Drop the n oldest tokens; of packed ones whole groups."""
        exact = n - self._drop_packed(n)
        if exact:
            self.tail.drop_front(exact)

    def _drop_packed(self, n: int) -> int:
        """Drop the n oldest tokens, as far as they are packed; return how many are."""
        n = min(n, self.packed_count)
        if n:
            assert self.packed is not None
            self.packed.drop_front(n)
        return n

    def pack(
        self,
        nonpadding: Tensor | None = None,
        prompt: bool = False,
        positions: Positions | None = None,
        later: int = 0,
    ) -> None:
        """Pack the tokens of the tail that were due before the newest `later` tokens came.

        The other arguments are those of `extend`.
        """
        if self.packed is None:
            return
        due = self.packed.fmt.to_pack(self.tail.count - later, self.recent, prompt)
        if due:
            self._pack(self.tail.view(due), self.packed_count, nonpadding, positions)
            self.tail.drop_front(due)

    def _pack(
        self, x: Tensor, begin: int, nonpadding: Tensor | None, positions: Positions | None
    ) -> None:
        """Pack x [B, Hk, T, D], the tokens from `begin` on, for which the other arguments hold."""
        assert self.packed is not None
        end = begin + x.shape[2]
        if nonpadding is not None:
            nonpadding = nonpadding[:, :, begin:end]
            assert nonpadding.shape[2] == x.shape[2], "a mask ends before the tokens"
        places = positions(begin, end) if positions and self.needs_positions else None
        self.packed.append(x, nonpadding, places)

    def offload(self, n: int) -> Sequence[Tensor]:
        """Remove the n oldest tokens, which are all packed (whole units) or all exact.

        Returns the tensors in which they are packed, or one of exact tokens.
        """
        if self.packed is not None:
            return self.packed.offload(n)
        x = self.tail.view()
        self.tail.replace(x[:, :, n:])
        return (x[:, :, :n],)

    def restore(self, removed: Sequence[Tensor], n: int) -> None:
        """Prepend n offloaded tokens, as `offload` returned them."""
        if self.packed is not None:
            self.packed.restore(removed, n)
        else:
            self.tail.replace(torch.cat([*removed, self.tail.view()], dim=2))

    def view_offloaded(self, removed: Sequence[Tensor], n: int) -> KVView:
        """Return n offloaded tokens as `kv_view` returns the others."""
        if self.packed is None:
            return KVView(None, removed[0])
        assert self.tail.allocation is not None
        packed, no_tail = self.packed, self.tail.allocation.data[:, :, :0]
        return KVView(packed.view(0, n, offloaded=removed), no_tail, packed.fmt.encoding)

    def kv_view(self, positions: Positions | None = None, gaps: bool = False) -> KVView:
        """Return all tokens, packed and exact, as one view that kernels read.

        positions: as in `extend`. gaps: whether positions are not consecutive.
        """
        exact, tail = self.tail.allocation, self.tail.count
        assert exact is not None, "no tokens yet"
        if self.packed is None:
            return KVView(None, exact.data, None, exact.start, tail)
        count, places = self.packed.count, None
        if positions and count and self.needs_positions:
            places = positions(0, count if gaps else 1)
        packed = self.packed.view(positions=places) if count else None
        return KVView(packed, exact.data, self.packed.fmt.encoding, exact.start, tail)

    def add(self, x: Tensor, nonpadding: Tensor | None = None) -> None:
        """Add x [B, Hk, N, D] to a side that `add` alone fills: all of it packed, or all exact.

        Packed tokens fill whole units and bytes. nonpadding: bool [B, Hk, N], False for padding.
        """
        if self.packed is not None:
            self.packed.append(x, nonpadding)
            x = x[:, :, :0]
        self.tail.replace(x if len(self.tail) == 0 else torch.cat([self.tail.view(), x], dim=2))

    def as_stored(self, x: Tensor, nonpadding: Tensor | None = None) -> Tensor:
        """Return a prompt x [B, Hk, N, D] as it is read once this side has stored it.

        nonpadding: bool [B, 1 or Hk, N].
        """
        if self.packed is None:
            return x
        count = self.packed.fmt.to_pack(x.shape[2], self.recent)
        nonpadding = None if nonpadding is None else nonpadding[:, :, :count]
        return torch.cat([self.as_packed(x[:, :, :count], nonpadding), x[:, :, count:]], dim=2)

    def as_packed(self, x: Tensor, nonpadding: Tensor | None) -> Tensor:
        """Return x [B, Hk, N, D] as it is read once `add` has stored it; nonpadding: as there."""
        if self.packed is None or not x.shape[2]:
            return x
        trial = self.packed.empty()
        trial.append(x, nonpadding)
        return trial.view().tensor()

    def take(self, units: Tensor, unit: int) -> None:
        """Keep only some units of `unit` tokens, in a new order, of a side that `add` filled.

        units: int64 [M], which may name a unit several times.
        """
        if self.packed is None:
            x = self.tail.view()
            self.tail.replace(take_units(x, units, x.shape[2] // unit))
        else:
            self.packed.take(units, unit)
