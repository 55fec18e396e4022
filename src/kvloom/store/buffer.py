"""A tensor of tokens that grows and shrinks without a copy at every step.

Decides capacity: a full buffer grows by a sixteenth (at least 16 tokens), so a step copies O(1)
tokens on average and at most a sixteenth of the room is unused. Where tokens come in large blocks,
or their number is bounded, the buffer grows by no more than they need. A buffer that shrinks
releases its memory once three quarters of it (and 64 tokens) are unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.append.reference import WriteTarget


class Buffer:
    """Tokens along dimension 2 of a [B, Hk, capacity, D] tensor; live ones are start..stop.

    tight: grow by the new tokens alone. most: limits the capacity up to that many tokens.
    """

    def __init__(self, tight: bool = False, most: int = 0) -> None:
        self.tight, self.most = tight, most
        self.data: Tensor | None = None
        self.start = 0
        self.stop = 0
        self.before: dict[str, Any] | None = None  # the entry of an `undo.Undo`, during a step

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, spare room included."""
        return 0 if self.data is None else self.data.nbytes

    def view(self, most: int | None = None) -> Tensor:
        """Return the live tokens [B, Hk, N, D], the `most` oldest or all of them; a view."""
        assert self.data is not None, "an empty buffer has no shape yet"
        stop = self.stop if most is None else min(self.stop, self.start + most)
        return self.data[:, :, self.start : stop]

    @property
    def storage(self) -> Tensor:
        """The tensor from the oldest live token on, spare room included; a view."""
        assert self.data is not None, "an empty buffer has no shape yet"
        return self.data[:, :, self.start :] if self.start else self.data

    def append(self, x: Tensor) -> None:
        """Add x [B, Hk, T, D] behind the live tokens."""
        data, at = self.room(x)
        self.stop += x.shape[2]
        data[:, :, at : self.stop] = x

    def room(self, x: Tensor) -> WriteTarget:
        """Make room for x [B, Hk, T, D] behind the live tokens; raise `stop` to make it live."""
        if self.data is None:
            self.data = x.new_empty(x.shape)
        elif self.stop + x.shape[2] > self.data.shape[2]:
            self._make_room(x.shape[2])
        return WriteTarget(self.data, self.stop)

    def spare_room(self, t: int) -> WriteTarget | None:
        """Return the room for t tokens behind the live ones; None if they do not fit."""
        if self.data is None or self.stop + t > self.data.shape[2]:
            return None
        return WriteTarget(self.data, self.stop)

    def extend(self, t: int, like: Tensor) -> Tensor:
        """Add t tokens that are not written yet, shaped as in `like` [B, Hk, any, D].

        Returns the storage from the oldest live token on, with the spare room after the newest.
        """
        if self.data is None:
            self.data = like.new_empty(*like.shape[:2], t, *like.shape[3:])
        elif self.stop + t > self.data.shape[2]:
            self._make_room(t)
        self.stop += t
        return self.data[:, :, self.start :] if self.start else self.data

    def replace(self, x: Tensor) -> None:
        """Replace all tokens by a copy of x [B, Hk, N, D], without spare room."""
        self.data = x.detach().clone(memory_format=torch.contiguous_format)
        self.start, self.stop = 0, x.shape[2]

    def drop_front(self, n: int) -> None:
        """Drop the n oldest tokens; release memory once most of it is unused."""
        self.start += n
        self._shrink()

    def drop_back(self, n: int) -> None:
        """Drop the n newest tokens."""
        self.stop -= n
        self._shrink()

    def clear(self) -> None:
        """Drop all tokens and the storage."""
        self.data, self.start, self.stop = None, 0, 0

    def trim(self) -> None:
        """Release all spare room."""
        if self.data is not None and self.data.shape[2] > len(self):
            self.replace(self.view())

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Replace the storage by fn(storage), fn acting on the batch dimension."""
        if self.data is not None:
            self.data = fn(self.data).contiguous()

    def state(self) -> dict[str, Any] | None:
        """Return the live tokens, their start and the capacity: a loaded buffer grows alike.

        None: the buffer never had a token.
        """
        if self.data is None:
            return None
        return {"live": self.view(), "start": self.start, "room": self.data.shape[2]}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Load a state that `state` returned."""
        if state is None:
            return
        live: Tensor = state["live"]
        b, h, n, *rest = live.shape
        self.data = live.new_empty(b, h, state["room"], *rest)
        self.start, self.stop = state["start"], state["start"] + n
        self.view().copy_(live)

    def _make_room(self, t: int) -> None:
        assert self.data is not None
        live = self.view()
        need = len(self) + t
        capacity = need if self.tight else need + max(16, need // 16)
        if need <= self.most:
            capacity = min(capacity, self.most)
        capacity = max(capacity, self.data.shape[2])
        b, h, _, *rest = self.data.shape
        grown = self.data.new_empty(b, h, capacity, *rest)
        grown[:, :, : len(self)] = live
        before = self.before
        if before and before["data"] is self.data and before["start"] == self.start:
            before.update(data=grown, start=0, stop=before["stop"] - self.start)
        self.data, self.start, self.stop = grown, 0, need - t

    def _shrink(self) -> None:
        assert self.data is not None
        if self.data.shape[2] > 4 * (self.stop - self.start) + 64:
            self.replace(self.view())
