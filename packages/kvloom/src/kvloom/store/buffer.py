"""A tensor of tokens that grows and shrinks without a copy at every step.

Decides capacity. A full buffer grows by a sixteenth, at least 16 tokens. So a step copies O(1)
tokens on average, and at most a sixteenth of the room is unused. A buffer of large blocks, or of
bounded length, grows by exactly the tokens added. A buffer that shrinks releases its memory once
three quarters of it (and 64 tokens) are unused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.append.reference import WriteTarget
from ..state import Stateful


@dataclass(slots=True)
class Allocation:
    """A tensor [B, Hk, capacity, D], and the slot of its oldest live token.

    A buffer that grows replaces the tensor in its allocation; every other change of `start` or of
    live tokens makes a new allocation. So a copy of a buffer's attributes remains valid when the
    buffer grows, and does not keep the old tensor (see `state.Undo`).
    """

    data: Tensor
    start: int = 0


class Buffer(Stateful):
    """Tokens along dimension 2 of a tensor: `count` live ones, from the allocation's start on.

    tight: grow by the new tokens alone. most: limits the capacity up to that many tokens.
    """

    def __init__(self, tight: bool = False, most: int = 0) -> None:
        self.tight, self.most = tight, most
        self.allocation: Allocation | None = None  # None before the first token
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def held(self) -> Iterator[Tensor]:
        """Yield the tensor, spare room included."""
        if self.allocation is not None:
            yield self.allocation.data

    def view(self, most: int | None = None) -> Tensor:
        """Return the live tokens [B, Hk, N, D], the `most` oldest or all of them; a view."""
        allocation = self.allocation
        assert allocation is not None, "an empty buffer has no shape yet"
        count = self.count if most is None else min(self.count, most)
        return allocation.data[:, :, allocation.start : allocation.start + count]

    def append(self, x: Tensor) -> None:
        """Add x [B, Hk, T, D] after the live tokens."""
        data, slot = self.room(x)
        t = x.shape[2]
        data[:, :, slot : slot + t] = x
        self.count += t

    def room(self, x: Tensor) -> WriteTarget:
        """Make room for x [B, Hk, T, D] after the live tokens; raise `count` to make it live."""
        t = x.shape[2]
        if self.allocation is None:
            b, h, _, *rest = x.shape
            self.allocation = Allocation(x.new_empty(b, h, t, *rest))
        else:
            self.reserve(t)
        return WriteTarget(self.allocation.data, self.allocation.start + self.count)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` tokens after the live ones, in a buffer that has a shape."""
        allocation = self.allocation
        assert allocation is not None
        if allocation.start + self.count + tokens > allocation.data.shape[2]:
            self._make_room(allocation, tokens)

    def reserved(self, tokens: int) -> Tensor:
        """Return the room for `tokens` tokens after the live ones [B, Hk, tokens, D]; a view."""
        allocation = self.allocation
        assert allocation is not None
        stop = allocation.start + self.count
        return allocation.data[:, :, stop : stop + tokens]

    def spare_room(self, t: int) -> WriteTarget | None:
        """Return the room for t tokens after the live ones; None if they do not fit."""
        allocation = self.allocation
        if allocation is None:
            return None
        stop = allocation.start + self.count
        return WriteTarget(allocation.data, stop) if stop + t <= allocation.data.shape[2] else None

    def replace(self, x: Tensor) -> None:
        """Replace all tokens by a copy of x [B, Hk, N, D], without spare room."""
        self.adopt(x.detach().clone(memory_format=torch.contiguous_format))

    def adopt(self, x: Tensor) -> None:
        """Replace all tokens by x [B, Hk, N, D] itself, contiguous, which nothing else writes."""
        self.allocation, self.count = Allocation(x), x.shape[2]

    def drop_front(self, n: int) -> None:
        """Drop the n oldest tokens; release memory once most of it is unused."""
        allocation = self.allocation
        assert allocation is not None
        self.allocation = Allocation(allocation.data, allocation.start + n)
        self.count -= n
        self._shrink()

    def drop_back(self, n: int) -> None:
        """Drop the n newest tokens."""
        self.count -= n
        self._shrink()

    def clear(self) -> None:
        """Drop all tokens and the storage."""
        self.allocation, self.count = None, 0

    def trim(self) -> None:
        """Release all spare room."""
        if self.allocation is not None and self.allocation.data.shape[2] > self.count:
            self.replace(self.view())

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace the storage by fn(storage), fn acting on the batch dimension."""
        allocation = self.allocation
        if allocation is not None:
            self.allocation = Allocation(fn(allocation.data).contiguous(), allocation.start)

    def state(self) -> dict[str, Any] | None:
        """Return the live tokens, their start and the capacity: a loaded buffer grows alike.

        None: the buffer never had a token.
        """
        allocation = self.allocation
        if allocation is None:
            return None
        return {"live": self.view(), "start": allocation.start, "room": allocation.data.shape[2]}

    def load_state(self, state: Any, like: Tensor | None) -> None:
        """Load a state that `state` returned."""
        if state is None:
            return
        live: Tensor = state["live"]
        b, h, n, *rest = live.shape
        self.allocation = Allocation(live.new_empty(b, h, state["room"], *rest), state["start"])
        self.count = n
        self.view().copy_(live)

    def _make_room(self, allocation: Allocation, t: int) -> None:
        need = self.count + t
        capacity = grown_capacity(need, self.tight)
        if need <= self.most:
            capacity = min(capacity, self.most)
        b, h, room, *rest = allocation.data.shape
        grown = allocation.data.new_empty(b, h, max(capacity, room), *rest)
        grown[:, :, : self.count] = self.view()
        allocation.data, allocation.start = grown, 0

    def _shrink(self) -> None:
        assert self.allocation is not None
        if self.allocation.data.shape[2] > 4 * self.count + 64:
            self.replace(self.view())


def take_units(x: Tensor, units: Tensor, stored: int) -> Tensor:
    """Return x [B, Hk, N, ...], of `stored` equal units along N, with only these units, in order.

    units: int64 [M], which may name a unit several times.
    """
    if x.shape[2] == 0:
        return x
    return x.unflatten(2, (stored, -1)).index_select(2, units).flatten(2, 3)


def grown_capacity(need: int, tight: bool) -> int:
    """Return the capacity of a tensor that grows to hold `need` tokens, or rows of them."""
    return need if tight else need + max(16, need // 16)
