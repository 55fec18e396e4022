"""Eviction while a text grows: every step is scored, and the lowest scores leave.

Scores add up over the steps. A layer evicts down to its budget whenever it has more tokens, or
more than a limit. Without a limit each step evicts one token once the budget is full; the tokens
are then in slots, where nothing moves. Where the recipe renumbers positions, stored keys keep
theirs, and every step rotates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..keep import choose
from ..kernels.attend.regions import KVView, Region
from ..kernels.select.reference import gather
from ..positions.rope import renumber
from ..recipe.spec import Recipe
from .score_evictor import Decision, ScoreEvictor, note_scores
from .scoring import RunningScores
from .segment import Segment
from .slot_storage import SlotStorage, Storage
from .step import KV, Queries, Trace


class StepEvictor(ScoreEvictor):
    """Scores every step, and evicts whenever there are too many tokens: see the module."""

    scores: RunningScores

    def __init__(self, recipe: Recipe, *args: Any) -> None:
        super().__init__(recipe, *args)
        self.scores = RunningScores(self.keep.scorer, self.sinks > 0, recipe.protect.marks)

    @property
    def scores_steps(self) -> bool:
        """Whether the scores need the attention mass of decode steps."""
        return self.keep.scorer.sums_attention

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision:
        """Score the tokens of a segment, `new` ones, or all slots, which the step's query read."""
        if isinstance(storage, SlotStorage):
            region, index = regions[0], storage.logical_index
            k, v = region.keys.tail, region.values.tail
            step = self.scorer.step(queries, k, v, region.visible, index, storage.seen, region.bias)
            return Decision(queries, self.scorer.score(step))
        k, v = new or storage.exact()
        if self.rope is not None and new is None:
            newest = storage.first + k.shape[2] - 1
            k = renumber(self.rope, k, storage.step_index(k.device), newest)
        return Decision(self.needed(queries), self.score_all(storage, queries, k, v), new=new)

    def evict(
        self, storage: Storage, decision: Decision, trace: Trace | None, recording: bool
    ) -> Storage:
        """Add a step's scores, and evict from a segment, or free the slot of one token."""
        if isinstance(storage, SlotStorage):
            total = self.scores.with_step(storage.scores, decision.scores)
            if trace is not None:
                trace.scored = storage.logical_index.long(), total
            visible = storage.mask(decision.queries.visible)
            storage.evict(total, visible, storage.seen - self.recent)
            return storage
        (visible, new), scores = (decision.queries.visible, decision.new), decision.scores
        self.heavy = self.heavy if decision.heavy is None else decision.heavy
        self.scores.add(scores, self.sinks_among(storage, scores, visible, len(self.scores)))
        if trace is not None:
            note_scores(trace, storage, self.scores.scores.clone())
        k, v = new or storage.exact()
        n, slots = k.shape[2], None
        if self.keep.drops(n):
            assert self.heavy is not None
            mask = storage.mask(visible, hi=n)
            slots = choose(self.scores.scores, self.heavy, self.recent, mask)
        if slots is not None:
            self.scores.keep(slots)
            storage.note_kept(slots, n, index=True)
            k, v = gather(k, slots), gather(v, slots)
        if new is not None:
            storage.extend(k, v, 0, visible, prompt=True)
        elif slots is not None:
            storage.replace(k, v)
        return self._next_storage(storage, visible, recording)

    def _next_storage(self, segment: Segment, visible: Tensor | None, recording: bool) -> Storage:
        """Return where tokens are stored: in slots once the budget is full, all sinks included.

        visible: bool [B, 1, seen tokens], False for padding. recording: a crop may follow.
        """
        if self.keep.limit is not None or recording or len(segment) != self.budget_tokens:
            return segment
        if self.sinks and visible is not None and bool((visible.sum(dim=-1) < self.sinks).any()):
            return segment
        keys = segment.exact_keys()
        index = segment.step_index(keys.device).expand(*keys.shape[:3]).int()
        seen = segment.first + len(segment)
        slots = SlotStorage(keys, segment.exact_values(), self.scores.scores, index, seen)
        self.scores.clear()
        for side in (segment.keys, segment.values):  # what undoes the step refers to it
            side.tail.clear()
        return slots

    def in_segment(self, storage: Storage) -> Storage:
        """Return the tokens of slots as a segment, oldest first."""
        if not isinstance(storage, SlotStorage):
            return storage
        keys, values, scores, index = storage.in_order()
        self.scores.put(scores)
        return Segment.kept_of(keys, values, index, storage.seen)

    def renumbered(self, regions: list[Region], storage: Storage, newest: int) -> list[Region]:
        """Return the regions of a step, with keys at new positions: see the base class."""
        if self.rope is None or not regions:
            return regions
        (region,) = regions  # an exact store has one
        keys = region.keys.tail
        keys = renumber(self.rope, keys, storage.step_index(keys.device), newest)
        return [region._replace(keys=KVView(None, keys))]
