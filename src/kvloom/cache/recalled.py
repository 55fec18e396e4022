"""A layer that keeps everything and reads what matters.

A step of one token reads the protected tokens, those that its index finds, and those that are not
in the index yet; longer steps read everything. Decides when tokens enter the index: once they have
left the recent window and are in their final format, so that the index speaks of keys as stored.
Where the recipe has a tier, they leave the body for it then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMisuse, TierError
from ..kernels.select import reference as ref
from ..positions.alibi import Alibi
from ..recall import Aside, Far, Finder, Form
from ..store import Lane, Packed
from ..store.codec import Plain
from ..store.formats import META
from .gather_plan import behind, chosen
from .layer import Asked, LayerCache
from .segment import Piece

# Of a tier that is read whole, so many tokens are copied at a time.
_STRETCH = 8192


class RecalledLayer(LayerCache):
    """A `LayerCache` with a `Finder` over the oldest tokens of its body."""

    def reset(self) -> None:
        """Forget everything."""
        assert self.recipe.recall is not None
        self.recall = self.recipe.recall
        super().reset()
        self.finder: Finder = self.recall.index.finder()
        self.aside = Aside()  # where the index grows
        store, tier = self.recipe.store, self.recall.tier
        forms = _form(store.keys), _form(store.values)
        self.far = None if tier is None else Far(tier, forms, store.unit)
        self.lost = ""  # why the tier cannot be used any more
        self.query: Tensor | None = None  # [B, Hq, D] of the running step, if it is to recall
        self.mask: Tensor | None = None  # padding so far, bool [B, 1, seen]
        self.chosen: Tensor | None = None  # slots [B, Hk, M] of the last step, while `trace`

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held, the index among them, and of the tier."""
        return super().nbytes + self.finder.nbytes + (0 if self.far is None else self.far.nbytes)

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
        if self.lost:
            raise CacheMisuse(f"{self.name}: this cache is of no use any more: {self.lost}")
        self.aside.wait()
        try:
            return super().attend(q, k, v, scale=scale, valid=valid, softcap=softcap, alibi=alibi)
        except TierError as error:
            self.lost = str(error)
            raise

    @property
    def parts(self) -> list[Any]:
        """The objects that a step changes."""
        own = [*super().parts, self.finder]
        return own if self.far is None else [*own, *self.far.parts]

    def roll_back(self) -> None:
        """Undo the last step; the copies on the device of tokens in the tier are dropped."""
        if self.undo is not None:
            self.aside.wait()
            super().roll_back()
            if self.far is not None:
                self.far.forget()

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        valid: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None,
    ) -> Tensor:
        self.query = q.detach()[:, :, 0] if q.shape[2] == 1 else None
        self.mask = None if valid is None else valid[:, None, :]
        return super()._attend(q, k, v, scale, valid, softcap, alibi)

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens, from the tier too."""
        self.check_crop(tokens)
        self.aside.wait()
        try:
            if tokens < self.seen and tokens > len(self.body) - self.body.away:
                self._bring_back()
            super().crop(tokens)
        except TierError as error:
            self.lost = str(error)
            raise

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        self.aside.wait()
        super().map(fn)
        self.finder.map(fn)
        if self.far is not None:
            self.far.map(fn)
        self.mask = None if self.mask is None else fn(self.mask)

    def _past(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        pieces = super()._past(see, alibi, present)
        if len(pieces) == 2 and pieces[1].choice is not None:
            return [behind(*pieces)]  # the sinks are read with the tokens chosen
        return pieces

    def _read(self, see: Tensor | None, alibi: Alibi | None, present: int) -> list[Piece]:
        tokens, room = self.finder.tokens, self.recall.tokens - self.recipe.always_read
        self.chosen = None
        if self.query is None or room >= tokens:
            return [*self._far_pieces(see, alibi), *super()._read(see, alibi, present)]
        found, front = room - room % self.recall.index.unit, self.recipe.pinned_prefix
        end = front + tokens
        slots = self.finder.find(
            self.query, found, self.recall.group, lambda: self._keys(front, end)
        )
        if front:
            always = torch.arange(front, device=slots.device).expand(*slots.shape[:2], -1)
            slots = torch.cat([always, slots + front], dim=-1)
        if self.trace:
            self.chosen = slots
        body, n = self.body, len(self.body)
        valid: tuple[Tensor | None, ...] = (None, None)
        if see is not None:
            valid = _at(body.see(see, 0, end), slots), body.see(see, end, n)
        bias: tuple[Tensor | None, ...] = (None, None)
        if alibi is not None:
            logical = body.logical(0, end, slots.device)
            bias = alibi.bias(_at(logical, slots)), body.bias(alibi, end, n)
        rest = partial(body.pieces, see, present, alibi, begin=end)
        if self.far is not None:
            return [Piece(*self.far.read(slots), valid[0], bias=bias[0]), *rest()]
        keys, values = body.keys, body.values

        def gather() -> tuple[Tensor, Tensor]:
            return self._gather(keys, end, slots), self._gather(values, end, slots)

        gaps = body.index is not None
        strands = keys.whole(body.positions, gaps), values.whole()
        return [chosen(strands, slots, end, valid, bias, rest, gather)]

    def _far_pieces(self, see: Tensor | None, alibi: Alibi | None) -> list[Piece]:
        """All of the tier, a stretch at a time."""
        pieces: list[Piece] = []
        if self.far is None:
            return pieces
        body, step = self.body, max(1, _STRETCH // self.far.unit) * self.far.unit
        for lo in range(0, self.far.tokens, step):
            hi = min(lo + step, self.far.tokens)
            keys, values = (
                lane.wrap(part, hi - lo)
                for lane, part in zip((body.keys, body.values), self.far.raw(lo, hi), strict=True)
            )
            bias = None if alibi is None else body.bias(alibi, lo, hi)
            pieces.append(Piece(keys, values, body.see(see, lo, hi), bias=bias))
        return pieces

    def _take(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        super()._take(k, v, asked)
        if not self.recording:
            self._index()

    def _settle(self, asked: Asked | None) -> None:
        super()._settle(asked)
        self._index()

    def _index(self) -> None:
        """Take into the index what is due, and put it into the tier."""
        body, index = self.body, self.recall.index
        if not len(body):
            return
        lanes = [lane for lane in (body.keys, body.values) if lane.packed is not None]
        ready = len(body) - max(self.recipe.protect.recents)
        ready = max(0, min([ready, *(body.away + lane.sealed for lane in lanes)]))
        if self.far is not None:
            ready = ready // self.far.unit * self.far.unit
        ready = max(0, ready - self.recipe.pinned_prefix)
        if self.finder.tokens > ready:  # a crop reached into it
            self._bring_back()
            self.finder = index.finder()
        see = self.mask
        if see is not None and self.sinks is not None:
            see = self.sinks.hide(see)
        while due := index.due(self.finder.tokens, ready - self.finder.tokens):
            lo = self.recipe.pinned_prefix + self.finder.tokens
            keys, real = self._keys(lo, lo + due), body.see(see, lo, lo + due)
            if real is None:
                real = keys.new_ones(keys.shape[0], 1, due, dtype=torch.bool)
            real = real[:, :1]  # heads have their padding at the same places
            self.aside.run(partial(self.finder.extend, keys, real), keys, real)
        if self.far is not None and self.finder.tokens:
            self.aside.wait()
            self._put_away(self.far, self.recipe.pinned_prefix + self.finder.tokens - body.away)

    def _put_away(self, far: Far, tokens: int) -> None:
        """Put the oldest tokens of the body into the tier."""
        if tokens:
            assert self.like is not None
            far.append(self.body.give(tokens), tokens, self.like)

    def _bring_back(self) -> None:
        """Move all of the tier to the body and forget the index."""
        if self.far is None or not self.far.tokens:
            return
        self.body.take_back(self.far.raw(0, self.far.tokens))
        self.far, self.finder = self.far.fresh(), self.recall.index.finder()

    def _keys(self, lo: int, hi: int) -> Tensor:
        """The keys [B, Hk, hi - lo, D] of tokens lo to hi of the body, which lie here."""
        away = self.body.away
        keys = self.body.keys.view(lo - away, hi - away, self.body.positions)
        return keys if isinstance(keys, Tensor) else keys.tensor()

    def _gather(self, lane: Lane, tokens: int, slots: Tensor) -> Tensor:
        """The tokens at slots [B, H, M] among the first `tokens` of a lane: [B, H, M, D]."""
        x = lane.view(0, tokens, self.body.positions)
        if isinstance(x, Tensor):
            return ref.gather(x, slots)
        if not isinstance(x.codec, Plain) or x.rope is not None:
            return ref.gather(x.tensor(), slots)  # there, all are unpacked to choose some
        return ref.gather_packed(
            x.codes, x.scale, x.zero, x.fmt.bits, x.fmt.axis, x.codec.group, slots, x.dtype
        )


def _at(x: Tensor | None, slots: Tensor) -> Tensor:
    """x [B or 1, Hk or 1, N] at slots [B, H, M], H a multiple of Hk: [B, H, M]."""
    assert x is not None
    b, h, m = slots.shape
    by_head = slots.reshape(b, x.shape[1], -1)
    return x.expand(b, -1, -1).gather(2, by_head).view(b, h, m)


def _form(fmt: Packed | None) -> Form | None:
    """What a tier needs to know of a format."""
    return None if fmt is None else Form(fmt.bits, fmt.axis, fmt.group, META[fmt.meta])
