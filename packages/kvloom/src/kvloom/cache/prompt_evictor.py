"""Eviction once, by scores of the first prompt; all later tokens stay.

Heads may keep different numbers of tokens (`RaggedTokens`), and the model may repeat the prompt to
score it (`RepetitionScores`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..keep import choose, sinks_first
from ..kernels.attend.regions import Region
from ..kernels.select.reference import gather
from ..positions.rope import renumber
from ..recipe.spec import Recipe
from .evictor import Phase
from .ragged import RaggedChoice, RaggedTokens
from .score_evictor import Decision, ScoreEvictor, note_scores
from .scoring import RepetitionScores
from .segment import Segment
from .slot_storage import Storage
from .step import KV, Queries, Trace


class PromptEvictor(ScoreEvictor):
    """Evicts once, after the first prompt: see the module."""

    def __init__(self, recipe: Recipe, *args: Any) -> None:
        super().__init__(recipe, *args)
        if self.keep.scorer.repeats:
            self.repetition = RepetitionScores(self.keep, self.sinks, self.scorer)
        self.ragged = None if self.keep.budget.head_share is None else RaggedTokens(recipe)

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision | None:
        """Return the scores of a repetition, once it has run, or those that `queries` give."""
        assert isinstance(storage, Segment)
        if self.repetition is None:
            k, v = new or storage.exact()
            return Decision(self.needed(queries), self.score_all(storage, queries, k, v), new=new)
        queries = self.needed(queries)
        if self.repetition.scores is None:
            self.wait(Phase.REPEATING, queries)
            return None
        return Decision(queries, self.repetition.pop(len(storage)))

    def evict(
        self, storage: Storage, decision: Decision, trace: Trace | None, recording: bool
    ) -> Storage:
        """Store the tokens that stay, packed where they are due, and evict no more."""
        assert isinstance(storage, Segment)
        queries, new = decision.queries, decision.new
        visible = queries.visible
        k, v = new or storage.exact()
        n = k.shape[2]
        slots, choice = self.decided(storage, decision, n, trace)
        if slots is not None:
            v = self._fitted(storage, k, v, slots, choice, queries)
            masked = visible is not None or queries.alibi is not None
            indexed = masked or self.recipe.store.pre_rope or trace is not None
            if self.ragged is not None and choice is not None and choice.contested is not None:
                self.ragged.add(k, v, choice.contested, choice.counts, 0, visible, indexed)
            storage.note_kept(slots, n, indexed)
            k, v = gather(k, slots), gather(v, slots)
            if self.rope is not None:
                k = renumber(self.rope, k, slots, n - 1)
        self.phase = Phase.DONE
        if new is not None:
            storage.extend(k, v, 0, visible, prompt=True)
            return storage
        if slots is not None:
            storage.replace(k, v)
        storage.pack(visible, prompt=True)
        storage.trim()
        return storage

    def decided(
        self, storage: Segment, decision: Decision, tokens: int, trace: Trace | None = None
    ) -> tuple[Tensor | None, RaggedChoice | None]:
        """Return which of a prompt's tokens stay, as `choose` does; sinks always do."""
        queries, scores, heavy, counts, _ = decision
        visible, self.heavy = queries.visible, self.heavy if heavy is None else heavy
        sinks = self.sinks_among(storage, scores, visible)
        if sinks is not None:
            scores = scores.masked_fill(sinks, torch.inf)
        note_scores(trace, storage, scores)
        return self.choose(scores, tokens, storage.mask(visible, hi=tokens), counts)

    def choose(
        self, scores: Tensor, tokens: int, visible: Tensor | None, counts: Tensor | None = None
    ) -> tuple[Tensor | None, RaggedChoice | None]:
        """Return the slots int64 [B, Hk, M] of `tokens` tokens that stay.

        Slots ascend, but for a retriever sinks come first and padding next. None: all tokens stay.
        Tokens newer than the scores stay. The second value is the choice of `ragged`, where heads
        have different budgets. counts: as in `Decision`.
        """
        n, sinks = scores.shape[-1], scores == torch.inf
        best = choice = None
        if self.keep.drops(tokens):
            assert self.heavy is not None
            mask = None if visible is None else visible[..., :n]
            if self.ragged is None:
                best = choose(scores, self.heavy, self.recent, mask)
            else:
                choice = self.ragged.choose(scores, self.heavy, self.recent, mask, counts)
                best = None if choice is None else choice.guaranteed
        slots = None
        if best is not None:
            newer = torch.arange(n, tokens, device=best.device).expand(*best.shape[:2], -1)
            slots = torch.cat([best, newer], dim=-1)
        if self.recipe.recall is None or visible is None:  # it always reads the first tokens
            return slots, choice
        if slots is None:
            slots = torch.arange(tokens, device=visible.device).expand(*sinks.shape[:2], -1)
        newer_sinks = sinks.new_zeros(*sinks.shape[:2], tokens - n)
        return sinks_first(slots, torch.cat([sinks, newer_sinks], dim=2), visible), choice

    def _fitted(
        self,
        segment: Segment,
        k: Tensor,
        v: Tensor,
        slots: Tensor,
        choice: RaggedChoice | None,
        queries: Queries,
    ) -> Tensor:
        """Return the exact values v [B, Hk, N, D] of a prompt, fitted where tokens stay.

        segment: where the tokens at slots int64 [B, Hk, M] will be stored. queries: as `needed`
        returned them.
        """
        fit, n = self.keep.fit, k.shape[2]
        if fit is None:
            return v
        places = slots[..., None].expand(*slots.shape, k.shape[3])
        stays = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device).scatter(2, slots, True)
        shown = None if queries.visible is None else queries.visible[..., :n].expand_as(stays)
        kept = segment.keys.as_stored(
            gather(k, slots), None if shown is None else shown.gather(2, slots)
        )
        keys = k.scatter(2, places, kept)
        if self.ragged is not None and choice is not None and choice.contested is not None:
            contested = torch.zeros_like(stays)
            contested[..., : choice.contested.shape[2]] = choice.contested
            flat = self.ragged.keys.as_packed(
                k[contested][None, None], None if shown is None else shown[contested][None, None]
            )
            keys[contested], stays = flat[0, 0], stays | contested
        index = torch.arange(n, device=k.device).expand(1, 1, -1)
        step = self.scorer.step(queries, k, v, queries.visible, index, n, None)
        return fit(step, stays, keys)
