"""Eviction from blocks of tokens, once each, while a text grows.

Decides when a block is scored and which of its tokens stay. A layer's first tokens are in `Sinks`,
and those since the last block in its segment, packed as in a recipe that does not evict. Once a
block is older than the recent tokens, the queries since the last block score it. The tokens that
stay go to `RaggedTokens`, in their final format. No token is scored twice. A first prompt is one
block, if it has more than the recent tokens; it is exact when it is scored. The block after it
stays whole, so that short answers need no queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..keep import Step, head_budgets
from ..kernels.attend.regions import Region
from ..recipe.spec import Recipe
from ..store import Packed
from ..store.buffer import Buffer
from ..store.packed import PackedTokens
from .ragged import RaggedTokens
from .score_evictor import Decision, ScoreEvictor, note_scores
from .segment import Segment, joined_mask
from .sinks import Sinks
from .slot_storage import Storage
from .step import KV, Queries, Trace

QUERIES = Packed(4, "token", 0, "bf16", rotation="group")
"""The format of queries that wait for their block."""


class DueBlock(NamedTuple):
    """The `tokens` oldest tokens of a segment, of which all heads together keep `granted`.

    Attributes:
        tokens: How many tokens the block has.
        granted: How many tokens stay, over all heads.
        used: The tokens of the segment, those of the block included, that score it.
        queries: The number of these tokens that still have queries. Tokens of an earlier block
            have none.
        visible: bool [B, 1, seen tokens], False for padding and for sinks (None: no padding).
    """

    tokens: int
    granted: int
    used: int
    queries: int = 0
    visible: Tensor | None = None


class BlockEvictor(ScoreEvictor):
    """Evicts from each block of tokens once: see the module.

    Attributes:
        sinks_store: The layer's first tokens.
        ragged: The tokens that stay of the blocks so far.
        queries: The queries of the steps since the last block, [B, Hq, N, D], packed.
        norms: The norms of the layer's input at these queries, [B, 1, N, 1].
        offered: The tokens of a head that were in blocks so far.
        granted: Those of them that all heads kept.
        block: The block that waits for the scores of other layers.
    """

    counters = (*ScoreEvictor.counters, "offered", "granted")
    children = (*ScoreEvictor.children, "queries", "norms")
    ragged: RaggedTokens
    sinks_store: Sinks

    def __init__(self, recipe: Recipe, *args: Any) -> None:
        super().__init__(recipe, *args)
        self.ragged = RaggedTokens(recipe)
        self.sinks_store = Sinks(recipe.protect.sinks)
        self.queries, self.norms = PackedTokens(QUERIES), Buffer()
        self.offered, self.granted = 0, 0
        self.block: DueBlock | None = None

    @property
    def irreversible(self) -> bool:
        """Whether `forget` cannot undo a step: a block waits for the scores of other layers."""
        return self.block is not None

    @property
    def defers(self) -> bool:
        """Whether the layer stores a prompt exactly before it evicts some of it."""
        return True

    # --- when a block is due ----------------------------------------------------------------------

    def due(self, segment: Segment) -> DueBlock | None:
        """Return the next block to evict from, or None if too few tokens have gathered.

        The queries of the block and of the recent tokens score it. In the first prompt, all queries
        do, and the budget includes the tokens that wait for the next block. A block has whole
        groups of the format. The next one gets the tokens that rounding down leaves of its budget.
        """
        keep, unit, stored = self.keep, self.ragged.unit, len(segment)
        if stored <= self.recent:
            return None
        heads = segment.exact_keys().shape[1]
        if self._in_prompt(segment):
            first = keep.first_block(self.prompt_tokens, self.sinks, stored, heads, unit)
            return DueBlock(*first, stored) if first[0] else None
        if self._whole(segment):
            return None
        assert keep.block is not None
        assert keep.budget.fraction is not None
        size = -(-keep.block // unit) * unit
        count = (stored - self.recent) // size * size
        wanted = heads * keep.budget.fraction * (self.offered + count) - self.granted
        granted = head_budgets.granted(wanted, heads, count, unit)
        return DueBlock(count, granted, count + self.recent) if count else None

    def _whole(self, segment: Segment) -> int:
        """Return how many oldest tokens of a segment stay without a score, those to come included.

        They are the block after the first prompt, and a prompt that has too few tokens for a block.
        """
        assert self.keep.block is not None
        end = self.prompt_tokens + self.keep.block
        return max(0, end - segment.first) // self.ragged.unit * self.ragged.unit

    def keep_whole(self, segment: Segment, visible: Tensor | None, traced: bool) -> None:
        """Move the tokens that stay without a score, once they are older than the recent ones.

        visible: as in `Queries`. traced: whether a trace wants their logical indices.
        """
        count = self._whole(segment)
        later = len(segment) - count - self.recent
        if not count or later < 0:
            return
        shown = self.sinks_store.hide(visible)
        segment.pack(shown, later=later)
        k, v = segment.unpacked_keys(0, count), segment.unpacked_values(0, count)
        stays = torch.ones(k.shape[:3], dtype=torch.bool, device=k.device)
        indexed = self._indexed(shown, traced)
        self.ragged.add(k, v, stays, stays.sum(dim=-1), segment.first, shown, indexed)
        segment.drop_front(count)

    def _indexed(self, visible: Tensor | None, traced: bool) -> bool:
        """Return whether to remember the logical indices of tokens that stay."""
        return visible is not None or self.ragged.logical_index is not None or traced

    def _in_prompt(self, segment: Segment) -> bool:
        """Return whether a segment has tokens of the first prompt alone, all of them."""
        return not self.offered and segment.first + len(segment) <= self.prompt_tokens

    def hold(self, queries: Queries) -> None:
        """Hold queries: they score the block that their tokens belong to."""
        self._check_causal(queries)
        self.queries.append(queries.q)
        if queries.norms is not None:
            self.norms.append(queries.norms[:, None, :, None])

    def _that_score(self, segment: Segment, queries: Queries) -> Queries:
        """Return the queries of a step without those of tokens that stay without a score."""
        begin = max(0, self._whole(segment) - len(segment) + queries.tokens)
        return queries.slice(min(begin, queries.tokens), queries.tokens)

    def forget(self, tokens: int) -> None:
        """Drop the queries of the newest `tokens` tokens, which a crop removes."""
        for buffer in (self.queries, self.norms):
            if len(buffer):
                buffer.drop_back(min(tokens, len(buffer)))

    # --- its scores -------------------------------------------------------------------------------

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision | None:
        """Score the next block to evict from. Until it is complete, hold the queries; return None.

        The scores of padding are minus infinity. Tokens and queries are read as if each token had
        been a step.
        """
        assert isinstance(storage, Segment)
        block, prompt = self.due(storage), self._in_prompt(storage)
        shown = self.sinks_store.hide(queries.visible)
        if block is None or not prompt:
            self.protected = None  # all tokens of a prompt without a block stay
            queries = self._that_score(storage, queries)
        if block is None:
            if queries.tokens:
                self.hold(queries)
            storage.pack(shown, prompt)
            if prompt:
                storage.trim()
            return None
        if not prompt:
            later = len(storage) - block.used
            storage.pack(shown, later=later)
            queries = self.take_queries(queries, later)
        self.block = block._replace(queries=queries.tokens, visible=shown)
        scores = self.scorer.score(self._step(storage, queries))
        if self.protected is not None:
            scores = self.marked(scores)
        scores = scores[..., self.sinks : self.sinks + block.tokens]
        visible = storage.mask(shown, 0, block.tokens)
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        return Decision(self.needed(queries), scores)

    def take_queries(self, queries: Queries, later: int) -> Queries:
        """Return the held queries and those of a step after them, without the `later` newest.

        From now on, it holds those alone.
        """
        new, before = queries, len(self.queries)
        self.hold(new)
        q = self.queries.view().tensor()
        if before:
            norms = self.norms.view()[:, 0, :before, 0] if len(self.norms) else None
            queries = new.after(Queries(q[:, :, :before], new.scale, norms=norms))
        self.queries.clear()
        self.norms.clear()
        if later:
            self.hold(new.slice(new.tokens - later, new.tokens))
        return queries._replace(q=q).slice(0, q.shape[2] - later)

    def _check_causal(self, queries: Queries) -> None:
        """Raise `CacheMisuse` for queries that wait, if a score must know what they have seen."""
        if self.keep.scorer.sums_attention and queries.see_later:
            raise CacheMisuse(
                f"score {self.keep.scorer.kind!r} weighs later blocks causally, and tokens of this "
                "step see later ones (an image); use the score rotated, or when=prompt"
            )

    def divides_heads(self, tokens: int) -> bool:
        """Return whether heads of all layers compete for the tokens of a vote."""
        return self.keep.budget.layers == "joint"

    def ranked(self, vote: Tensor) -> tuple[Tensor, int]:
        """Return the scores for which heads compete, and how many of these tokens they win."""
        guaranteed, contested = self._shares(vote.shape[1])
        return vote.sort(dim=-1, descending=True).values[..., guaranteed:], contested

    def _shares(self, heads: int) -> tuple[int, int]:
        assert self.block is not None
        granted, ragged = self.block.granted, self.ragged
        return head_budgets.whole_shares(granted, ragged.head_share, heads, ragged.unit)

    def _step(self, segment: Segment, queries: Queries) -> Step:
        """Return the input of a score: the sinks, the tokens of the segment, and these queries."""
        assert self.block is not None
        used, sinks = self.block.used, self.sinks_store
        seen = segment.first + used
        sinks_region = sinks.region(seen, queries.visible)
        k = torch.cat([sinks_region.keys.tail, segment.unpacked_keys(0, used)], dim=2)
        v = torch.cat([sinks_region.values.tail, segment.unpacked_values(0, used)], dim=2)
        index, later = sinks.logical(seen)[:, None], segment.logical(0, used, k.device)
        index = torch.cat([index, later.expand(len(index), -1, -1)], dim=-1)
        masks = sinks_region.visible, segment.mask(sinks.hide(queries.visible), 0, used)
        visible = joined_mask(masks, (sinks.count, used), k[:, :1])  # padding is of all heads
        return self.scorer.step(queries, k, v, visible, index, seen, None)

    # --- eviction ---------------------------------------------------------------------------------

    def evict(
        self, storage: Storage, decision: Decision, trace: Trace | None, recording: bool
    ) -> Storage:
        """Store the tokens of the block that stay, drop the block, and pack what is due."""
        assert isinstance(storage, Segment)
        block, ragged, (queries, scores, *_) = self.block, self.ragged, decision
        assert block is not None
        guaranteed, _ = self._shares(scores.shape[1])
        counts = decision.counts
        if counts is None:
            counts = head_budgets.divide(*self.ranked(scores), ragged.unit)
        counts = counts + guaranteed
        stays = head_budgets.select(scores, 0, counts)[1]
        note_scores(trace, storage, scores)
        prompt, k = self._in_prompt(storage), storage.unpacked_keys(0, block.tokens)
        v = self._block_values(storage, queries, stays, block)
        if ragged.stored or block.granted:
            indexed = self._indexed(block.visible, trace is not None)
            ragged.add(k, v, stays, counts, storage.first, block.visible, indexed)
        self.offered, self.granted = self.offered + block.tokens, self.granted + block.granted
        storage.drop_front(block.tokens)
        storage.pack(block.visible, prompt)
        storage.trim()
        self.block = None
        return storage

    def _block_values(
        self, segment: Segment, queries: Queries, stays: Tensor, block: DueBlock
    ) -> Tensor:
        """Return the values of a block [B, Hk, tokens, D], fitted where tokens stay."""
        fit, n = self.keep.fit, block.tokens
        if fit is None or not block.granted:
            return segment.unpacked_values(0, n)
        step = self._step(segment, queries)
        kept = torch.ones(step.k.shape[:3], dtype=torch.bool, device=step.k.device)
        kept[..., self.sinks : self.sinks + n] = stays
        free = torch.zeros_like(kept)
        free[..., self.sinks : self.sinks + n] = stays
        keys = step.k.clone()
        shown = None if step.visible is None else step.visible.expand_as(free)[free][None, None]
        keys[free] = self.ragged.keys.as_packed(step.k[free][None, None], shown)[0, 0]
        values = fit(step, kept, keys, free, step.k.shape[2] - block.queries)
        return values[:, :, self.sinks : self.sinks + n]
