"""The first real tokens of every row, exact, beside a segment that holds the rest.

Decides where they lie and who sees them; how many there are is the recipe's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..positions.alibi import Alibi
from .part import Part


class Sinks:
    """The first `count` real tokens of every row, always exact.

    Rows of a left-padded batch begin at different logical indices (`start` [B]). The body begins
    at index `count` in any case: what lies before it is padding or a sink. Where a row's sinks lie
    behind it, the body holds them too, and `hide` masks them there.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.padded = False
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.start: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        held = (self.keys, self.values, self.start)
        return sum(t.nbytes for t in held if t is not None)

    def extend(self, k: Tensor, v: Tensor, seen: int, visible: Tensor | None) -> int:
        """Copy the sinks among k, v [B, Hk, T, D], whose logical indices are `seen` and on.

        Returns how many tokens at the front of k, v the segment does not hold.
        """
        b, h, t, _ = k.shape
        if self.keys is None or self.values is None:
            self.padded = visible is not None and not bool(visible.all())
            self.keys = k.new_zeros(b, h, self.count, k.shape[-1])
            self.values = v.new_zeros(b, h, self.count, v.shape[-1])
        if self.padded:
            assert visible is not None, "a padded batch keeps its mask"
            none = ~visible[:, 0].any(dim=-1)
            self.start = visible[:, 0].int().argmax(dim=-1).masked_fill(none, seen + t)
        else:
            self.start = torch.zeros(b, dtype=torch.long, device=k.device)
        slot = self._index() - seen  # [B, count]
        here = ((slot >= 0) & (slot < t))[:, None, :, None]
        slot = slot.clamp(0, t - 1)[:, None, :, None].expand(b, h, self.count, 1)

        def with_new(held: Tensor, new: Tensor) -> Tensor:
            found = new.detach().gather(2, slot.expand(-1, -1, -1, new.shape[-1]))
            return torch.where(here, found, held)

        self.keys, self.values = with_new(self.keys, k), with_new(self.values, v)
        return min(t, max(0, self.count - seen))

    def full(self, seen: int) -> bool:
        """Whether the first `seen` tokens hold every row's sinks."""
        if self.start is None:
            return False
        return seen >= self.count + (int(self.start.max()) if self.padded else 0)

    def part(
        self,
        seen: int,
        visible: Tensor | None = None,
        alibi: Alibi | None = None,
        first: int = 0,
    ) -> Part:
        """Return the sinks among the first `seen` tokens as a part.

        visible: bool [B, 1, seen or more] by logical index, False for padding. first: the logical
        index at which the segment begins.
        """
        assert self.keys is not None
        assert self.values is not None
        bias = None
        if alibi is not None:  # sinks still to come are hidden: any index does
            index = self._index()[:, None]
            index = index + self.behind(first) if alibi.closed_up else index
            bias = alibi.bias(index.clamp(max=seen - 1))
        if visible is None and not self.padded and seen >= self.count:
            return Part(self.keys, self.values, None, bias=bias)
        index = self._index()
        see = index < seen
        if visible is not None:
            see &= visible[:, 0].gather(1, index.clamp(max=visible.shape[-1] - 1))
        return Part(self.keys, self.values, see[:, None, :], bias=bias)

    def behind(self, first: int) -> Tensor:
        """How far the sinks lie behind a body that begins at index `first`: int64 [B, 1, count]."""
        by = first - self.count - self._index()[:, :1]
        return by.clamp(min=0)[:, None, :].expand(-1, -1, self.count)

    def hide(self, visible: Tensor | None) -> Tensor | None:
        """`visible` [B, 1, seen] without the sinks, for a body that holds them too."""
        if not self.padded or visible is None:
            return visible
        index = torch.arange(visible.shape[-1], device=visible.device)
        begin = self._index()[:, :1]
        return visible & ((index < begin) | (index >= begin + self.count))[:, None, :]

    def logical(self, seen: int) -> Tensor:
        """Logical indices of the sinks among the first `seen` tokens, [B, count]; else -1."""
        index = self._index()
        return index.masked_fill(index >= seen, -1)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        if self.keys is not None and self.values is not None and self.start is not None:
            self.keys, self.values = fn(self.keys), fn(self.values)
            self.start = fn(self.start)

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]

    def state(self) -> dict[str, Any]:
        """Return the state: see `LayerCache.state`."""
        return {name: getattr(self, name) for name in _STATE}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `state`."""
        for name in _STATE:
            setattr(self, name, state[name])

    def _index(self) -> Tensor:
        """Logical indices of the sinks [B, count]."""
        assert self.start is not None
        return self.start[:, None] + torch.arange(self.count, device=self.start.device)


_STATE = ("keys", "values", "start", "padded")
