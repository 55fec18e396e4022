"""A layer that keeps everything and reads what matters.

A step of one token reads the protected tokens, those that its index finds, and those that are not
in the index yet; longer steps read everything. Decides when tokens enter the index: once they have
left the recent window and are in their final format, so that the index speaks of keys as stored.
Where the recipe has a tier, they leave the body for it then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .alibi import Alibi
from .chosen import behind, chosen
from .errors import CacheMisuse, TierError
from .kernels.select import ref
from .layer import Asked, LayerCache
from .recall import Far, Finder
from .recipe import Recipe
from .rope import Rope
from .segment import Piece
from .store import Lane
from .store.codec import NOTHING, Known, Plain

# Of a tier that is read whole, so many tokens are copied at a time.
_STRETCH = 8192


class RecalledLayer(LayerCache):
    """A `LayerCache` with a `Finder` over the oldest tokens of its body."""

    def __init__(
        self,
        recipe: Recipe,
        name: str = "this layer",
        place: tuple[int, int] = (0, 1),
        rope: Rope | None = None,
        known: Known = NOTHING,
    ) -> None:
        assert recipe.recall is not None
        self.recall = recipe.recall
        super().__init__(recipe, name, place, rope, known)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.finder: Finder = self.recall.index.finder()
        self.far = None if self.recall.tier is None else Far(self.recall.tier)
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
        self.query = q.detach()[:, :, 0] if q.shape[2] == 1 else None
        before, self.mask = self.mask, None if valid is None else valid[:, None, :]
        try:
            return super().attend(q, k, v, scale=scale, valid=valid, softcap=softcap, alibi=alibi)
        except BaseException as error:
            self.mask = before
            self.lost = str(error) if isinstance(error, TierError) else ""
            raise

    def logical(self) -> Tensor:
        """Logical indices as `LayerCache.logical` gives them, the tier's behind the sinks."""
        found, n = super().logical(), self._far_tokens
        if n:
            sinks = 0 if self.sinks is None else self.sinks.count
            far = torch.arange(self._origin, self._origin + n, device=found.device)
            far = far.expand(*found.shape[:2], n)
            found = torch.cat([found[..., :sinks], far, found[..., sinks:]], dim=-1)
        return found

    @property
    def dropped(self) -> int:
        """Nothing is."""
        return 0

    def check_crop(self, tokens: int) -> None:
        """Refuse what `LayerCache.check_crop` does; what lies in a tier is exact too."""
        if self.far is None:
            super().check_crop(tokens)

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens, from the tier too."""
        if tokens < self.seen and tokens > len(self.body):
            self._bring_back()
        try:
            super().crop(tokens)
        except TierError as error:
            self.lost = str(error)
            raise

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
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
        tokens, room = self.finder.tokens, self.recall.tokens - self.recipe.protect.tokens
        self.chosen = None
        if self.query is None or room >= tokens:
            body = super()._read(see, alibi, present) if len(self.body) else []
            return [*self._far_pieces(see, alibi), *body]
        found = room - room % self.recall.index.unit
        slots = self.finder.find(
            self.query, found, self.recall.group, lambda: self._keys(0, tokens)
        )
        if self.trace:
            self.chosen = slots
        valid = None
        if see is not None:
            real = self._real(see, 0, tokens)
            valid = real.expand(-1, slots.shape[1], -1).gather(2, slots)
        bias = None if alibi is None else alibi.bias(self._origin + slots)
        begin = tokens - self._far_tokens
        rest = self.body.pieces(see, present, alibi, begin=begin)
        if self.far is not None:
            return [Piece(*self.far.read(slots), valid, bias=bias), *rest]
        keys, values = self.body.keys, self.body.values

        def gather() -> tuple[Tensor, Tensor]:
            return self._gather(keys, tokens, slots), self._gather(values, tokens, slots)

        strands = keys.whole(), values.whole()
        return [chosen(strands, slots, begin, valid, bias, rest, gather)]

    def _far_pieces(self, see: Tensor | None, alibi: Alibi | None) -> list[Piece]:
        """All of the tier, a stretch at a time."""
        pieces = []
        for lo in range(0, self._far_tokens, _STRETCH):
            assert self.far is not None
            hi = min(lo + _STRETCH, self.far.tokens)
            keys, values = self.far.view(lo, hi)
            index = torch.arange(self._origin + lo, self._origin + hi, device=keys.device)
            bias = None if alibi is None else alibi.bias(index.expand(1, 1, -1))
            valid = None if see is None else self._real(see, lo, hi)
            pieces.append(Piece(keys, values, valid, bias=bias))
        return pieces

    @property
    def _far_tokens(self) -> int:
        """Tokens in the tier."""
        return 0 if self.far is None else self.far.tokens

    @property
    def _origin(self) -> int:
        """The logical index of slot 0."""
        return self.body.first - self._far_tokens

    def _take(self, k: Tensor, v: Tensor, asked: Asked) -> None:
        super()._take(k, v, asked)
        if not self.recording:
            self._index()

    def _settle(self, asked: Asked | None) -> None:
        super()._settle(asked)
        self._index()

    def _index(self) -> None:
        """Take into the index what is due."""
        body, index = self.body, self.recall.index
        held = len(body) + self._far_tokens
        if not held:
            return
        ready = max(0, held - max(self.recipe.protect.recents))
        ready = min([ready, *(x.sealed for x in (body.keys, body.values) if x.packed is not None)])
        if self.finder.tokens > ready:  # a crop reached into it
            self._bring_back()
            self.finder = index.finder()
        see = self.mask
        if see is not None and self.sinks is not None:
            see = self.sinks.hide(see)
        while due := index.due(self.finder.tokens, ready - self.finder.tokens):
            lo, hi = self.finder.tokens, self.finder.tokens + due
            keys = self._keys(lo - self._far_tokens, hi - self._far_tokens)
            real = keys.new_ones(keys.shape[0], 1, due, dtype=torch.bool)
            self.finder.extend(keys, real if see is None else self._real(see, lo, hi))
        if self.far is not None and self.finder.tokens > self.far.tokens:
            self._move_away(self.far, self.finder.tokens - self.far.tokens)

    def _move_away(self, far: Far, tokens: int) -> None:
        """Move the oldest tokens of the body to the tier."""
        tails = self.body.keys.tail, self.body.values.tail
        far.append(*(tail.view()[:, :, :tokens] for tail in tails))
        for tail in tails:
            tail.replace(tail.view()[:, :, tokens:])
        self.body.first += tokens

    def _bring_back(self) -> None:
        """Move all of the tier to the body and forget the index."""
        if self.far is None or not self.far.tokens:
            return
        self.body.first -= self.far.tokens
        parts = zip(
            (self.body.keys.tail, self.body.values.tail),
            self.far.view(0, self.far.tokens),
            strict=True,
        )
        for tail, old in parts:
            tail.replace(torch.cat([old, tail.view()], dim=2))
        assert self.recall.tier is not None
        self.far, self.finder = Far(self.recall.tier), self.recall.index.finder()

    def _real(self, see: Tensor, lo: int, hi: int) -> Tensor:
        """Which tokens of the body are real, bool [B, 1, hi - lo]."""
        return see[:, :, self._origin + lo : self._origin + hi]

    def _keys(self, lo: int, hi: int) -> Tensor:
        """The keys [B, Hk, hi - lo, D] of tokens lo to hi of the body."""
        keys = self.body.keys.view(lo, hi, self.body.positions)
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
