"""Sinks: the first tokens of every row, exact, beside a segment with the other tokens.

Decides where they are stored and which queries see them; the recipe decides how many there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.attend.regions import Region
from ..positions.alibi import Alibi
from ..state import Stateful


class Sinks(Stateful):
    """The first `count` tokens of every row, padding not counted; always exact.

    Rows of a left-padded batch begin at different logical indices (`start` [B]). The segment
    begins at index `count` in any case: tokens before it are padding or sinks. Where a row's sinks
    come later, the segment stores them too, and `hide` masks them there.
    """

    tensors = ("keys", "values", "start")
    counters = ("padded",)

    def __init__(self, count: int) -> None:
        self.count = count
        self.padded = False
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.start: Tensor | None = None

    def extend(self, k: Tensor, v: Tensor, seen: int, visible: Tensor | None) -> int:
        """Copy the sinks among k, v [B, Hk, T, D], whose logical indices begin at `seen`.

        Returns the number of leading tokens of k, v that the caller must not store in the segment.
        """
        b, h, t, _ = k.shape
        if self.keys is None or self.values is None:
            self.padded = visible is not None and not bool(visible.all())
            self.keys = k.new_zeros(b, h, self.count, k.shape[-1])
            self.values = v.new_zeros(b, h, self.count, v.shape[-1])
        if self.padded and visible is not None:  # None: the padded rows are gone
            is_empty = ~visible[:, 0].any(dim=-1)
            self.start = visible[:, 0].int().argmax(dim=-1).masked_fill(is_empty, seen + t)
        else:
            self.start = torch.zeros(b, dtype=torch.long, device=k.device)
        slot = self._index() - seen  # [B, count]
        is_new = ((slot >= 0) & (slot < t))[:, None, :, None]
        slot = slot.clamp(0, t - 1)[:, None, :, None].expand(b, h, self.count, 1)

        def with_new(old: Tensor, new: Tensor) -> Tensor:
            present = new.detach().gather(2, slot.expand(-1, -1, -1, new.shape[-1]))
            return torch.where(is_new, present, old)

        self.keys, self.values = with_new(self.keys, k), with_new(self.values, v)
        return min(t, max(0, self.count - seen))

    def full(self, seen: int) -> bool:
        """Return whether the first `seen` tokens include every row's sinks."""
        if self.start is None:
            return False
        return seen >= self.count + (int(self.start.max()) if self.padded else 0)

    def region(
        self,
        seen: int,
        visible: Tensor | None = None,
        alibi: Alibi | None = None,
        first: int = 0,
    ) -> Region:
        """Return the sinks among the first `seen` tokens.

        visible: bool [B, 1, seen or more] by logical index, False for padding. first: the logical
        index at which the segment begins.
        """
        assert self.keys is not None
        assert self.values is not None
        bias = None
        if alibi is not None:  # slots of future sinks are masked, so their index does not matter
            index = self._index()[:, None]
            index = index + self.behind(first) if alibi.closed_up else index
            bias = alibi.bias(index.clamp(max=seen - 1))
        if visible is None and not self.padded and seen >= self.count:
            return Region.exact(self.keys, self.values, bias=bias)
        index = self._index()
        seen_sinks = index < seen
        if visible is not None:
            seen_sinks &= visible[:, 0].gather(1, index.clamp(max=visible.shape[-1] - 1))
        mask = seen_sinks[:, None, :]
        return Region.exact(self.keys, self.values, visible=mask, bias=bias)

    def behind(self, first: int) -> Tensor:
        """Return how many tokens are evicted between sinks and a segment that begins at `first`.

        Returns int64 [B, 1, count], the same for all sinks of a row.
        """
        evicted = first - self.count - self._index()[:, :1]
        return evicted.clamp(min=0)[:, None, :].expand(-1, -1, self.count)

    def hide(self, visible: Tensor | None) -> Tensor | None:
        """Return `visible` [B, 1, seen] without the sinks, for a segment that stores them too."""
        if not self.padded or visible is None:
            return visible
        index = torch.arange(visible.shape[-1], device=visible.device)
        assert self.start is not None
        begin = self.start[:, None]
        return visible & ((index < begin) | (index >= begin + self.count))[:, None, :]

    def logical(self, seen: int) -> Tensor:
        """Return logical indices int64 [B, count] of the sinks among `seen` tokens, others -1."""
        index = self._index()
        return index.masked_fill(index >= seen, -1)

    def _index(self) -> Tensor:
        """Return logical indices of the sinks, int64 [B, count]."""
        assert self.start is not None
        return self.start[:, None] + torch.arange(self.count, device=self.start.device)
