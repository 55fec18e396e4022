"""Recall: every token stays, and a step of one token reads the tokens that an index finds.

A step of one token reads the protected tokens, those that the index finds, and those that are not
indexed yet; longer steps read everything. Decides when tokens are indexed: once they have left the
recent window and are in their final format, so that the index describes keys as they are stored.
Where the recipe has a tier, the layer then offloads them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..errors import RecipeError
from ..kernels.attend.regions import Region, Slots
from ..positions.alibi import Alibi
from ..recall import Finder, OffloadStore, SideStream
from ..recipe.spec import Recipe
from ..state import Stateful
from .latents import whole_keys
from .segment import Segment, joined_mask
from .step import Queries, Trace


class Retriever(Stateful):
    """An index of the oldest tokens of a segment, and their offload store if there is a tier.

    latent: whether the layer stores latents.
    """

    uncounted = ("visible",)
    children = ("finder", "store")

    def __init__(self, recipe: Recipe, latent: bool = False) -> None:
        assert recipe.recall is not None
        self.latent = latent
        self.recipe, self.recall = recipe, recipe.recall
        self.finder: Finder = self.recall.index.finder()
        self.side_stream = SideStream()  # where the index grows
        self.store: OffloadStore | None = None
        if self.recall.tier is not None:
            stored = recipe.store
            formats = stored.keys, stored.values
            self.store = OffloadStore(self.recall.tier, formats, stored.block_tokens)
        self.visible: Tensor | None = None  # padding so far, bool [B, 1, seen]

    @property
    def learns(self) -> bool:
        """Whether the index waits for the queries of the first prompt."""
        return not self.finder.learned

    def read(
        self,
        segment: Segment,
        queries: Queries,
        visible: Tensor | None,
        alibi: Alibi | None,
        step_tokens: int,
        trace: Trace | None,
    ) -> list[Region]:
        """Return the tokens of a segment that a step reads, with its own `step_tokens` tokens.

        visible: bool [B, 1, seen tokens] by logical index, False for padding and sinks.
        """
        indexed, room = self.finder.tokens, self.recall.tokens - self.recipe.always_read
        if trace is not None:
            trace.recalled = None
        if queries.tokens > 1 or room >= indexed:
            offloaded = self._offloaded_regions(segment, visible, alibi)
            return [*offloaded, segment.region(visible, step_tokens, alibi)]
        slots = self._find(segment, queries.q, room - room % self.recall.index.unit)
        end = self.recipe.pinned_prefix + indexed
        if trace is not None:
            trace.recalled = slots
        masks: tuple[Tensor | None, Tensor | None] = (None, None)
        if visible is not None:
            masks = (
                _at(segment.mask(visible, 0, end), slots),
                segment.mask(visible, end, len(segment)),
            )
        bias = None
        if alibi is not None:
            bias = alibi.bias(_at(segment.logical(0, end, slots.device), slots))
        if self.store is not None:
            recalled = Region.exact(*self.store.read(slots), visible=masks[0], bias=bias)
            return [recalled, segment.region(visible, step_tokens, alibi, begin=end)]
        mask = joined_mask(masks, (slots.shape[2], len(segment) - end), slots)
        if alibi is not None and bias is not None:
            bias = torch.cat([bias, segment.bias(alibi, end, len(segment))], dim=2)
        return [Region(*segment.views(), Slots(slots, end), mask, bias, step_tokens)]

    def grow(self, segment: Segment, visible: Tensor | None, like: Tensor) -> None:
        """Index the tokens that are due, and offload them where the recipe has a tier.

        visible: bool [B, 1, seen], without the sinks. like: an empty tensor such as the keys.
        """
        if not len(segment):
            return
        pinned = self.recipe.pinned_prefix
        recent = max(self.recipe.protect.exact_recents)
        ready = max(0, min(len(segment) - recent, segment.packed_oldest))
        if self.store is not None:
            ready = ready // self.store.unit * self.store.unit
        ready = max(0, ready - pinned)
        if self.finder.tokens > ready:  # a crop removed indexed tokens
            self.restore(segment)
            self.finder = self._emptied()
        while due := self.recall.index.due(self.finder.tokens, ready - self.finder.tokens):
            indexed = self.finder.tokens
            lo = pinned + indexed
            keys = self._keys(segment, lo, lo + due)
            nonpadding = segment.mask(visible, lo, lo + due)
            if nonpadding is None:
                nonpadding = keys.new_ones(keys.shape[0], 1, due, dtype=torch.bool)
            nonpadding = nonpadding[:, :1]  # padding is the same in all heads
            self.side_stream.run(partial(self.finder.extend, keys, nonpadding), keys, nonpadding)
            if self.finder.tokens != indexed + due:
                raise RecipeError(
                    f"index {self.recall.index.kind!r} was given {due} keys and counted "
                    f"{self.finder.tokens - indexed}; add their number to `tokens` in `extend`"
                )
        if self.store is not None and self.finder.tokens:
            self.side_stream.wait()
            n = pinned + self.finder.tokens - segment.offloaded
            if n:
                self.store.append(segment.offload(n), n, like)

    def restore(self, segment: Segment) -> None:
        """Move all offloaded tokens back into the segment and discard the index."""
        if self.store is None or not self.store.tokens:
            return
        segment.restore(self.store.raw(0, self.store.tokens))
        self.store, self.finder = self.store.fresh(), self._emptied()

    def learn(self, queries: Queries, keys: Tensor) -> None:
        """Show the index the first prompt: its last queries, and its exact keys [B, Hk, N, D]."""
        nonpadding, nonpadding_queries = queries.visible, queries.visible_queries
        if nonpadding is None or nonpadding_queries is None:
            nonpadding = keys.new_ones(keys.shape[0], 1, keys.shape[2], dtype=torch.bool)
            nonpadding_queries = nonpadding[..., -queries.tokens :]
        self.finder.learn(queries.q, keys, nonpadding, nonpadding_queries)

    def _emptied(self) -> Finder:
        finder = self.recall.index.finder()
        finder.inherit(self.finder)
        return finder

    def _keys(self, segment: Segment, lo: int, hi: int) -> Tensor:
        """Return the keys of tokens lo to hi that queries are multiplied with, unpacked."""
        keys = segment.unpacked_keys(lo, hi)
        if not self.latent:
            return keys
        return whole_keys(keys, segment.unpacked_values(lo, hi))

    def _find(self, segment: Segment, q: Tensor, count: int) -> Tensor:
        """Return slots int64 [B, H, M] of a segment for queries q [B, Hq, 1, D]."""
        pinned = self.recipe.pinned_prefix
        keys = partial(self._keys, segment, pinned, pinned + self.finder.tokens)
        slots = self.finder.find(q[:, :, 0], count, self.recall.query_heads, keys)
        if not pinned:
            return slots
        always = torch.arange(pinned, device=slots.device).expand(*slots.shape[:2], -1)
        return torch.cat([always, slots + pinned], dim=-1)

    def _offloaded_regions(
        self, segment: Segment, visible: Tensor | None, alibi: Alibi | None
    ) -> list[Region]:
        """Return all offloaded tokens as regions."""
        regions: list[Region] = []
        if self.store is None:
            return regions
        for lo, hi in self.store.ranges():
            sides = (segment.keys, segment.values)
            keys, values = (
                side.view_offloaded(tensors, hi - lo)
                for side, tensors in zip(sides, self.store.raw(lo, hi), strict=True)
            )
            bias = None if alibi is None else segment.bias(alibi, lo, hi)
            regions.append(Region(keys, values, None, segment.mask(visible, lo, hi), bias))
        return regions


def _at(x: Tensor | None, slots: Tensor) -> Tensor:
    """Return x [B or 1, Hk or 1, N] at slots [B, H, M], H a multiple of Hk: [B, H, M]."""
    assert x is not None
    b, h, m = slots.shape
    by_head = slots.reshape(b, x.shape[1], -1)
    return x.expand(b, -1, -1).gather(2, by_head).view(b, h, m)
