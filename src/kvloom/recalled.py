"""A layer that keeps everything and reads what matters.

A step of one token reads the protected tokens, those that its index finds, and those that are not
in the index yet; longer steps read everything. Decides when tokens enter the index: once they have
left the recent window and are in their final format, so that the index speaks of keys as stored.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .alibi import Alibi
from .kernels.select import ref
from .layer import Asked, LayerCache
from .recall import Finder
from .recipe import Recipe
from .rope import Rope
from .segment import Piece
from .store import Lane
from .store.packed import PackedView


class RecalledLayer(LayerCache):
    """A `LayerCache` with a `Finder` over the oldest tokens of its body."""

    def __init__(
        self,
        recipe: Recipe,
        name: str = "this layer",
        place: tuple[int, int] = (0, 1),
        rope: Rope | None = None,
    ) -> None:
        assert recipe.recall is not None
        self.recall = recipe.recall
        super().__init__(recipe, name, place, rope)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.finder: Finder = self.recall.index.finder()
        self.query: Tensor | None = None  # [B, Hq, D] of the running step, if it is to recall
        self.mask: Tensor | None = None  # padding so far, bool [B, 1, seen]
        self.chosen: Tensor | None = None  # slots [B, Hk, M] of the last step, while `trace`

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, the index among them."""
        return super().nbytes + self.finder.nbytes

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        valid: Tensor | None = None,
        softcap: float | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend as `LayerCache.attend` does, a step of one token to what it recalls."""
        self.query = q.detach()[:, :, 0] if q.shape[2] == 1 else None
        before, self.mask = self.mask, None if valid is None else valid[:, None, :]
        try:
            return super().attend(q, k, v, scale=scale, valid=valid, softcap=softcap, alibi=alibi)
        except BaseException:
            self.mask = before
            raise

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        super().map(fn)
        self.finder.map(fn)
        self.mask = None if self.mask is None else fn(self.mask)

    def _read(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        tokens, room = self.finder.tokens, self.recall.tokens - self.recipe.protect.tokens
        self.chosen = None
        if self.query is None or room >= tokens:
            return super()._read(see, alibi, present)
        found = room - room % self.recall.index.unit
        slots = self.finder.find(self.query, found, self.recall.group, self._keys)
        if self.trace:
            self.chosen = slots
        valid = None
        if see is not None:
            real = self._real(see, 0, tokens)
            valid = real.expand(-1, slots.shape[1], -1).gather(2, slots)
        bias = None if alibi is None else alibi.bias(self.body.first + slots)
        keys, values = (_gather(lane, tokens, slots) for lane in (self.body.keys, self.body.values))
        rest = self.body.pieces(see, present, alibi, begin=tokens)
        return [Piece(keys, values, valid, bias=bias), *rest]

    def _take(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        super()._take(k, v, asked)
        if not self.recording:
            self._index()

    def _settle(self, asked: Asked | None) -> None:
        super()._settle(asked)
        self._index()

    def _index(self) -> None:
        """Take into the index what is due."""
        if not len(self.body):
            return
        body, index = self.body, self.recall.index
        ready = max(0, len(body) - max(self.recipe.protect.recents))
        ready = min([ready, *(x.sealed for x in (body.keys, body.values) if x.packed is not None)])
        if self.finder.tokens > ready:  # a crop reached into it
            self.finder = index.finder()
        see = self.mask
        if see is not None and self.sinks is not None:
            see = self.sinks.hide(see)
        while due := index.due(self.finder.tokens, ready - self.finder.tokens):
            lo, hi = self.finder.tokens, self.finder.tokens + due
            keys = body.keys.view(lo, hi)
            keys = keys if isinstance(keys, Tensor) else keys.tensor()
            real = keys.new_ones(keys.shape[0], 1, due, dtype=torch.bool)
            self.finder.extend(keys, real if see is None else self._real(see, lo, hi))

    def _real(self, see: Tensor, lo: int, hi: int) -> Tensor:
        """Which tokens of the body are real, bool [B, 1, hi - lo]."""
        return see[:, :, self.body.first + lo : self.body.first + hi]

    def _keys(self) -> Tensor:
        """The keys in the index, [B, Hk, N, D]."""
        keys = self.body.keys.view(0, self.finder.tokens)
        return keys if isinstance(keys, Tensor) else keys.tensor()


def _gather(lane: Lane, tokens: int, slots: Tensor) -> Tensor:
    """The tokens at slots [B, H, M] among the first `tokens` of a lane: [B, H, M, D]."""
    x = lane.view(0, tokens)
    if isinstance(x, PackedView):
        fmt = x.fmt
        return ref.gather_packed(
            x.codes, x.scale, x.zero, fmt.bits, fmt.axis, fmt.group, slots, x.dtype
        )
    return ref.gather(x, slots)
