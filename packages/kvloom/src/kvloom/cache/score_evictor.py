"""Eviction by score: when a layer's tokens are scored, and which of them stay.

The prompt's own queries score it, and the tokens with the highest scores stay, within the budget.
Decides when tokens are scored and which of them are evicted, by one of these strategies:
`PromptEvictor` evicts once, after the prompt; `StepEvictor` at every step (in `SlotStorage`, where
nothing moves); `LimitEvictor` whenever a layer has more tokens than a limit. `block_evictor` has
one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..keep import PROTECTED, budgets, choose, sinks_first
from ..keep.select import first_tokens
from ..kernels.attend.regions import KVView, Region
from ..kernels.select.reference import gather
from ..positions.rope import Rope, renumber, renumber_once
from ..recipe.parts import BudgetGroup
from ..recipe.spec import Recipe
from .evictor import Evictor, Phase
from .ragged import RaggedChoice, RaggedTokens
from .scoring import RepetitionScores, RunningScores, StepScorer
from .segment import Segment
from .sinks import Sinks
from .slot_storage import SlotStorage, Storage
from .step import KV, Queries, Trace


class Decision(NamedTuple):
    """What a layer evicts by: scores fp32 [B, Hk, N] of exact tokens.

    queries: those that an eviction needs: see `ScoreEvictor.needed`. heavy: heavy hitters that the
    layer keeps from now on (None: as before). counts: int64 [B, Hk], the tokens that each head wins
    where heads of all layers compete (None: its own scores decide). new: the keys and values of the
    tokens, if they are not stored yet (None: they are).
    """

    queries: Queries
    scores: Tensor
    heavy: int | None = None
    counts: Tensor | None = None
    new: KV | None = None


class ScoreEvictor(Evictor):
    """Drops the tokens of a layer with the lowest scores, down to its budget.

    layer: index of the layer among those of the cache, which seeds noise. budget_group: its place
    among the layers that divide a budget. rope: rotates keys again where the recipe renumbers
    positions. score_rope: the model's rotary embedding, for scores that need it. head: index of the
    first key/value head in the model, which seeds noise.

    heavy, recent: the budget: heavy hitters (None: not known yet) and newest tokens. prompt_tokens:
    of the first prompt; 0 before `set_budget`. pending_queries,
    pending_scores: the queries whose eviction waits for a repetition or for other layers, and their
    scores (None: none). protected: bool
    [B, 1, N], the tokens of a first prompt that the recipe marks, until they are scored.
    sinks_store: the first tokens; None: they are in the segment, and their score is infinity.
    """

    counters = (*Evictor.counters, "heavy", "recent", "prompt_tokens")
    children: ClassVar[tuple[str, ...]] = ("scores", "scorer", "repetition", "ragged")
    scores: RunningScores | None = None
    sinks_store: Sinks | None = None
    heavy: int | None

    def __init__(
        self,
        recipe: Recipe,
        layer: int,
        budget_group: BudgetGroup,
        rope: Rope | None = None,
        score_rope: Rope | None = None,
        head: int = 0,
    ) -> None:
        super().__init__(recipe)
        keep = self.keep
        self.budget_group, self.rope, self.sinks = budget_group, rope, recipe.protect.sinks
        seed = (keep.seed * 1_009 + layer) % (1 << 32)  # 32 bits are hashed
        rotation = score_rope if keep.needs_rope else None
        self.scorer = StepScorer(keep.scorer, keep.query_heads, self.sinks, seed, head, rotation)
        self.by_variance = keep.budget.layers in budgets.BY_VARIANCE
        self.heavy, self.recent, self.prompt_tokens = None, 0, 0
        self.pending_queries: Queries | None = None
        self.pending_scores: Tensor | None = None
        self.protected: Tensor | None = None

    # --- its budget -------------------------------------------------------------------------------

    @property
    def scoring(self) -> bool:
        """Whether scores decide which tokens stay, as long as tokens are evicted."""
        return self.phase is not Phase.DONE

    @property
    def irreversible(self) -> bool:
        """Whether a step changes the scores of tokens, which no crop takes back."""
        return self.scoring

    @property
    def waits_for_layers(self) -> bool:
        """Whether the next decision needs the scores of other layers."""
        divided = self.by_variance and self.heavy is not None
        return self.keep.shared if divided else self.keep.waits_for_layers

    @property
    def defers(self) -> bool:
        """Whether the layer stores a prompt exactly before it evicts some of it."""
        return self.scoring and (self.waits_for_layers or self.repetition is not None)

    @property
    def budget_tokens(self) -> int:
        """The most tokens that the layer keeps between steps, or keeps of a first prompt."""
        return (self.heavy or 0) + self.recent

    def divides_heads(self, tokens: int) -> bool:
        """Return whether heads of all layers compete for the tokens of a vote."""
        return self.keep.budget.layers == "joint" and self.budget_tokens < tokens

    def check_prompt(self, tokens: int) -> None:
        """Raise `RecipeError` if a first prompt is too short for the budgets of all layers."""
        self.keep.layer_tokens(tokens, self.budget_group.size)

    def set_budget(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        self.prompt_tokens, self.phase = prompt_tokens, Phase.EVICTING
        self.recent = self.keep.budget.recent_of(prompt_tokens)
        if not self.by_variance:
            self.heavy = self.divided(None)

    def divided(self, variances: list[float] | None) -> int:
        """Return the number of heavy hitters of this layer.

        variances: of the scores of each layer (None: the recipe does not divide by variance).
        """
        index, size = self.budget_group
        return self.keep.budget.heavy(self.prompt_tokens, size, variances)[index]

    # --- its scores -------------------------------------------------------------------------------

    def note_protected(self, queries: Queries, tokens: int) -> None:
        """Note which tokens of a first prompt of `tokens` tokens the recipe marks."""
        protect, visible = self.recipe.protect, queries.visible
        if not protect.marks:
            return
        if visible is None:
            visible = torch.ones(1, 1, tokens, dtype=torch.bool, device=queries.q.device)
        count = visible[:, 0].cumsum(dim=-1)
        self.protected = protect.mark(count - 1, count[:, -1:], queries.ids)[:, None]

    def marked(self, scores: Tensor) -> Tensor:
        """Return scores fp32 [B, Hk, N], the first ones with `PROTECTED` for protected tokens."""
        protected, self.protected = self.protected, None
        assert protected is not None
        return scores.masked_fill(protected, PROTECTED)

    def wait(self, phase: Phase, queries: Queries, scores: Tensor | None = None) -> None:
        """Begin to wait for a repetition, or with `scores` for other layers."""
        self.phase, self.pending_queries, self.pending_scores = phase, queries, scores

    def end_wait(self) -> Queries:
        """Wait no longer; return the queries that waited."""
        queries = self.pending_queries
        assert queries is not None
        self.phase, self.pending_queries, self.pending_scores = Phase.EVICTING, None, None
        return queries

    def ranked(self, vote: Tensor) -> tuple[Tensor, int]:
        """Return the scores for which heads compete, and how many of these tokens they win.

        vote: the scores of the layer, fp32 [B, Hk, N]. See `RaggedTokens.ranked`.
        """
        assert self.ragged is not None
        assert self.pending_queries is not None
        assert self.heavy is not None
        return self.ragged.ranked(vote, self.heavy, self.recent, self.pending_queries.visible)

    def needed(self, queries: Queries) -> Queries:
        """Return the queries that an eviction still needs, of a step or a block that was scored.

        Those that no fit needs are dropped where the eviction may wait.
        """
        fit = self.keep.fit
        if fit is None:
            waits = self.waits_for_layers or self.repetition is not None
            return queries.without_queries() if waits else queries
        rows = fit.rows(queries.q, queries.visible_queries)
        return queries._replace(q=rows, products=None, lse=None)


class RunningEvictor(ScoreEvictor):
    """An evictor that adds up the scores of all steps: see `RunningScores`."""

    scores: RunningScores

    def __init__(self, recipe: Recipe, *args: Any) -> None:
        super().__init__(recipe, *args)
        self.orders_sinks = recipe.recall is not None  # a retriever always reads the first tokens
        self.needs_positions = recipe.store.pre_rope
        self.scores = RunningScores(self.keep.scorer, self.sinks > 0, recipe.protect.marks)

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision | None:
        """Score a segment's tokens, or `new` ones: all that the layer has seen, and all exact.

        new: keys and values of a prompt that the layer does not store before it evicts from it.
        regions: those that the step attended to. None: the decision waits for a repetition.
        """
        assert isinstance(storage, Segment)
        k, v = (storage.exact_keys(), storage.exact_values()) if new is None else new
        n = k.shape[2]
        index, visible = storage.logical(0, n, k.device), storage.mask(queries.visible, hi=n)
        bias = None if queries.alibi is None else storage.bias(queries.alibi, 0, n)
        seen = storage.first + n
        if new is None:
            k = self._step_keys(k, index, seen - 1)
        scores = self.scorer.score(self.scorer.step(queries, k, v, visible, index, seen, bias))
        return Decision(self.needed(queries), scores, new=new)

    def evict(
        self, storage: Storage, decision: Decision, trace: Trace | None, drafting: bool
    ) -> Storage:
        """Add a step's scores, evict down to the budget, and pack what is due.

        drafting: a crop may follow. Returns where tokens are stored from now on.
        """
        assert isinstance(storage, Segment)
        queries, scores, heavy, counts, new = decision
        self.heavy = self.heavy if heavy is None else heavy
        k, v = (storage.exact_keys(), storage.exact_values()) if new is None else new
        n = k.shape[2]
        self.scores.add(scores, self._new_sinks(storage, scores, queries.visible))
        if trace is not None:
            scores = self.scores.scores.clone()
            index = storage.logical(0, scores.shape[-1], scores.device)
            trace.scored = index.expand_as(scores), scores
        slots, choice = self.choose(n, storage.mask(queries.visible, hi=n), counts)
        if slots is not None:
            v = self._fitted(storage, k, v, slots, choice, queries)
            indexed = self._needs_index(queries, trace)
            if self.ragged is not None and choice is not None and choice.contested is not None:
                self.ragged.add(k, v, choice.contested, choice.counts, 0, queries.visible, indexed)
            storage.note_kept(slots, n, indexed)
            k, v = self._kept_keys(gather(k, slots), slots, n), gather(v, slots)
        if new is not None:
            storage.extend(k, v, 0, queries.visible, prompt=True)
            return self.next_storage(storage, queries.visible, drafting)
        if slots is not None:
            storage.replace(k, v)
        next_storage = self.next_storage(storage, queries.visible, drafting)
        if next_storage is storage:
            once = self.phase is Phase.DONE
            storage.pack(queries.visible, prompt=once)
            if once:
                storage.trim()
        return next_storage

    def next_storage(self, segment: Segment, visible: Tensor | None, drafting: bool) -> Storage:
        """Return where tokens are stored after an eviction.

        visible: bool [B, 1, seen tokens], False for padding. drafting: a crop may follow.
        """
        return segment

    def choose(
        self, tokens: int, visible: Tensor | None, counts: Tensor | None = None
    ) -> tuple[Tensor | None, RaggedChoice | None]:
        """Return the slots int64 [B, Hk, M] of `tokens` tokens that stay; drop the other scores.

        Slots ascend, but for a retriever sinks come first and padding next. None: all tokens stay.
        Tokens newer than the scores stay: they follow the only prompt that is scored. The second
        value is the choice of `ragged`, where heads have different budgets. counts: as in
        `Decision`.
        """
        scores = self.scores.scores
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
            self.scores.keep(best)
            newer = torch.arange(n, tokens, device=best.device).expand(*best.shape[:2], -1)
            slots = torch.cat([best, newer], dim=-1)
        if not self.orders_sinks or visible is None:
            return slots, choice
        if slots is None:
            slots = torch.arange(tokens, device=visible.device).expand(*sinks.shape[:2], -1)
        newer_sinks = sinks.new_zeros(*sinks.shape[:2], tokens - n)
        return sinks_first(slots, torch.cat([sinks, newer_sinks], dim=2), visible), choice

    # --- what strategies differ in ----------------------------------------------------------------

    def _step_keys(self, keys: Tensor, index: Tensor, newest: int) -> Tensor:
        """Return stored keys [B, Hk, N, D] as a step attends to them; newest: its last index."""
        return keys

    def _kept_keys(self, k: Tensor, slots: Tensor, tokens: int) -> Tensor:
        """Return k [B, Hk, M, D], kept at slots of `tokens` tokens, as they are stored."""
        return k

    def _needs_index(self, queries: Queries, trace: Trace | None) -> bool:
        """Return whether a part of the layer needs the logical indices of tokens that stay."""
        return True

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
        kept = segment.keys.as_stored(gather(k, slots), segment.keys.recent)
        keys = k.scatter(2, places, kept)
        stays = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device).scatter(2, slots, True)
        if self.ragged is not None and choice is not None and choice.contested is not None:
            contested = torch.zeros_like(stays)
            contested[..., : choice.contested.shape[2]] = choice.contested
            flat = self.ragged.keys.as_packed(k[contested][None, None])
            keys[contested], stays = flat[0, 0], stays | contested
        index = torch.arange(n, device=k.device).expand(1, 1, -1)
        step = self.scorer.step(queries, k, v, queries.visible, index, n, None)
        return fit(step, stays, keys)

    def _new_sinks(self, segment: Segment, scores: Tensor, visible: Tensor | None) -> Tensor | None:
        """Return which tokens with scores [B, Hk, N] are sinks, bool [B or 1, Hk or 1, N].

        visible: bool [B, 1, seen tokens] by logical index, False for padding. None: there are no
        sinks, or none that came since `scores`.
        """
        if not self.sinks or (visible is None and segment.first + len(self.scores) >= self.sinks):
            return None
        index = segment.logical(0, scores.shape[-1], scores.device)
        if visible is None:
            return index < self.sinks
        first = first_tokens(visible.shape[-1], self.sinks, visible, visible.device)
        shape = torch.broadcast_shapes(index.shape[:2], first.shape[:2])
        return first.expand(*shape, -1).gather(2, index.expand(*shape, -1))


class PromptEvictor(RunningEvictor):
    """Evicts once, after the first prompt, and keeps all later tokens.

    Its heads may keep different numbers of tokens (`ragged`), and the model may repeat the prompt
    to score it (`repetition`).
    """

    def __init__(self, recipe: Recipe, *args: Any) -> None:
        super().__init__(recipe, *args)
        if self.keep.scorer.repeats:
            self.repetition = RepetitionScores(self.keep, self.sinks, self.scorer)
        self.ragged = None if self.keep.budget.head_share is None else RaggedTokens(recipe)

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision | None:
        """Return the scores of a repetition, once it has run, or those that `queries` give."""
        if self.repetition is None:
            return super().score(storage, queries, new)
        queries = self.needed(queries)
        if self.repetition.scores is None:
            self.wait(Phase.REPEATING, queries)
            return None
        return Decision(queries, self.repetition.take(len(storage)))

    def next_storage(self, segment: Segment, visible: Tensor | None, drafting: bool) -> Storage:
        """Return the segment, where tokens stay from now on; evict no more."""
        self.scores.clear()
        self.phase = Phase.DONE
        return segment

    def _kept_keys(self, k: Tensor, slots: Tensor, tokens: int) -> Tensor:
        """Return k, rotated to its final positions where the recipe renumbers them."""
        return k if self.rope is None else renumber_once(self.rope, k, slots, tokens)

    def _needs_index(self, queries: Queries, trace: Trace | None) -> bool:
        """Return whether padding, ALiBi, RoPE or a trace needs the indices."""
        masked = queries.visible is not None or queries.alibi is not None
        return masked or self.needs_positions or trace is not None


class LimitEvictor(RunningEvictor):
    """Scores every step, and evicts down to the budget whenever there are more tokens than a limit.

    Where the recipe renumbers positions, stored keys keep theirs, and every step rotates them.
    """

    @property
    def scores_steps(self) -> bool:
        """Whether the scores need the attention mass of decode steps."""
        return self.keep.scorer.sums_attention

    def renumbered(self, regions: list[Region], storage: Storage, newest: int) -> list[Region]:
        """Return the regions of a step, with keys at new positions: see the base class."""
        if self.rope is None or not regions:
            return regions
        (region,) = regions  # an exact store has one
        keys = region.keys.tail
        keys = self._step_keys(keys, storage.step_index(keys.device), newest)
        return [region._replace(keys=KVView(None, keys))]

    def _step_keys(self, keys: Tensor, index: Tensor, newest: int) -> Tensor:
        """Return stored keys, rotated to new positions where the recipe renumbers them."""
        return keys if self.rope is None else renumber(self.rope, keys, index, newest)


class StepEvictor(LimitEvictor):
    """Scores every step, and evicts down to the budget at every step.

    Once each step evicts one token, the tokens are in slots.
    """

    def next_storage(self, segment: Segment, visible: Tensor | None, drafting: bool) -> Storage:
        """Return where tokens are stored: in slots once the budget is full, all sinks included."""
        if len(segment) != self.budget_tokens or drafting:
            return segment
        if self.sinks and visible is not None and bool((visible.sum(dim=-1) < self.sinks).any()):
            return segment
        keys = segment.exact_keys()
        index = segment.step_index(keys.device).expand(*keys.shape[:3]).int()
        seen = segment.first + len(segment)
        slots = SlotStorage(keys, segment.exact_values(), self.scores.scores, index, seen)
        self.scores.clear()
        return slots

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision | None:
        """Score the tokens of a segment, or all slots, which the step's query read."""
        if not isinstance(storage, SlotStorage):
            return super().score(storage, queries, new)
        region, index = regions[0], storage.logical_index
        k, v = region.keys.tail, region.values.tail
        step = self.scorer.step(queries, k, v, region.visible, index, storage.seen, region.bias)
        return Decision(queries, self.scorer.score(step))

    def evict(
        self, storage: Storage, decision: Decision, trace: Trace | None, drafting: bool
    ) -> Storage:
        """Evict from a segment, or free the slot of the token that is evicted."""
        if not isinstance(storage, SlotStorage):
            return super().evict(storage, decision, trace, drafting)
        total = self.scores.with_step(storage.scores, decision.scores)
        if trace is not None:
            trace.scored = storage.logical_index.long(), total
        visible = storage.mask(decision.queries.visible)
        storage.evict(total, visible, storage.seen - self.recent)
        return storage

    def in_segment(self, storage: Storage) -> Storage:
        """Return the tokens of slots as a segment, oldest first."""
        if not isinstance(storage, SlotStorage):
            return storage
        keys, values, scores, index = storage.in_order()
        self.scores.put(scores)
        return Segment.kept_of(keys, values, index, storage.seen)
