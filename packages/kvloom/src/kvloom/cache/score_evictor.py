"""Eviction by score: when a layer's tokens are scored, and which of them stay.

Decides when tokens are scored and which of them are evicted. The prompt's own queries score it, and
the tokens with the highest scores stay, within the budget. Later, `when="step"` scores every step
and evicts down to the budget (in `SlotStorage`, where nothing moves); `when="prompt"` keeps all
later tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..keep import budgets, choose, sinks_first
from ..kernels.select.reference import gather
from ..positions.renumber import renumber, renumber_once
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from .evictor import Evictor
from .part import Part
from .ragged import RaggedChoice, RaggedTokens
from .repetition import RepetitionScores
from .running_scores import RunningScores
from .segment import Segment
from .slot_storage import SlotStorage, Storage
from .step import Queries, StepInputs
from .step_scorer import StepScorer
from .trace import Trace


class ScoreEvictor(Evictor):
    """Drops the tokens of a layer with the lowest running scores, down to its budget.

    layer: number of the layer among those of the cache, which seeds noise. budget_rank: (rank,
    count) of the layer among those that divide a budget. rope: rotates keys again where the recipe
    renumbers positions. score_rope: the model's rotary embedding, for scores that need it. head:
    the model's number of the first key/value head, which seeds noise.
    """

    def __init__(
        self,
        recipe: Recipe,
        layer: int,
        budget_rank: tuple[int, int],
        rope: Rope | None = None,
        score_rope: Rope | None = None,
        head: int = 0,
    ) -> None:
        assert recipe.keep is not None
        keep = self.keep = recipe.keep
        self.budget_rank, self.rope, self.sinks = budget_rank, rope, recipe.protect.sinks
        self.orders_sinks = recipe.recall is not None  # a retriever always reads the first tokens
        self.needs_positions = recipe.store.pre_rope
        seed = (keep.seed * 1_009 + layer) % (1 << 32)  # 32 bits are hashed
        rotation = score_rope if keep.scorer.rotates else None
        self.scorer = StepScorer(keep.scorer, keep.group, seed, head, rotation)
        self.scores = RunningScores(keep.scorer, self.sinks)
        self.heavy = self.recent = 0
        self.prompt_tokens = 0  # tokens of the first prompt; 0: none was scored
        self.done = False  # no more tokens are evicted
        self.awaits_variances = keep.budget.layers in budgets.BY_VARIANCE
        self.joint = keep.budget.layers == "joint"  # heads of all layers compete for tokens
        self.repetition = RepetitionScores(self.sinks) if keep.scorer.repeats else None
        self.ragged = None if keep.budget.heads is None else RaggedTokens(recipe)
        self.waiting: Queries | None = None  # until other layers, or a repetition, have scored

    @property
    def nbytes(self) -> int:
        """Bytes of the scores."""
        return self.scores.nbytes + sum(part.nbytes for part in self._parts)

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        parts = [x for part in self._parts for x in part.mutable]
        return [self, self.scorer, *self.scores.mutable, *parts]

    @property
    def _parts(self) -> list[RepetitionScores | RaggedTokens]:
        return [part for part in (self.repetition, self.ragged) if part is not None]

    @property
    def sums_scores(self) -> bool:
        """True: it adds up scores of steps, which a crop cannot subtract again."""
        return True

    @property
    def begun(self) -> bool:
        """Whether the budget is set."""
        return self.prompt_tokens > 0

    @property
    def waits(self) -> bool:
        """Whether a decision needs the scores of other layers."""
        return self.keep.shared or self.awaits_variances or self.joint

    @property
    def awaits_repetition(self) -> bool:
        """Whether the model must repeat the first prompt, which scores its tokens."""
        return self.repetition is not None and not self.done

    @property
    def decides_later(self) -> bool:
        """Whether the layer stores a prompt exactly before it evicts some of it."""
        return not self.done and (self.waits or self.repetition is not None)

    @property
    def stores_first(self) -> bool:
        """Whether a long step's tokens are stored, exact, before it evicts some."""
        return not self.done

    @property
    def budget_tokens(self) -> int:
        """The most tokens that the layer keeps between steps."""
        return self.heavy + self.recent

    @property
    def scores_steps(self) -> bool:
        """Whether the scores need the attention mass of decode steps."""
        return not self.done and self.keep.scorer.weighs and self.keep.when != "prompt"

    @property
    def scores_more(self) -> bool:
        """Whether the queries of a draft will score."""
        already_scored = self.keep.when == "prompt" and len(self.scores) > 0
        return not self.done and not already_scored and self.repetition is None

    @property
    def renumbers_steps(self) -> bool:
        """Whether stored keys keep their positions, and every step rotates them to new ones.

        One-shot eviction rotates keys once, when they are stored.
        """
        return self.rope is not None and self.keep.when != "prompt"

    def decides(self, queries: Queries) -> bool:
        """Return whether scores of these queries, or of a repetition, decide what stays."""
        return queries.tokens > 0 or self.repetition is not None

    def check_prompt(self, tokens: int) -> None:
        """Raise `RecipeError` if a first prompt is too short for the budgets of all layers."""
        self.keep.rooms(tokens, self.budget_rank[1])

    def begin(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        self.prompt_tokens = prompt_tokens
        self.recent = self.keep.budget.window(prompt_tokens)
        if not self.awaits_variances:
            self.divide(None)

    def divide(self, variances: list[float] | None) -> None:
        """Set the number of heavy hitters.

        variances: of the scores of each layer (None: the recipe does not divide by variance).
        """
        rank, count = self.budget_rank
        by_layer = self.keep.budget.heavy(self.prompt_tokens, count, variances)
        self.heavy, self.awaits_variances = by_layer[rank], False

    def renumbered(self, parts: list[Part], storage: Storage, newest: int) -> list[Part]:
        """Return the parts of a step, with keys at new positions if the recipe renumbers them.

        storage: of the parts. newest: the logical index of the step's newest token.
        """
        if not self.renumbers_steps or not parts:
            return parts
        (part,) = parts  # an exact store has one
        index = storage.step_index(part.exact_keys.device)
        assert self.rope is not None
        return [part._replace(keys=renumber(self.rope, part.exact_keys, index, newest))]

    def keep_prompt(
        self, segment: Segment, queries: Queries, k: Tensor, v: Tensor, trace: Trace | None
    ) -> tuple[Tensor, Tensor]:
        """Score a prompt k, v [B, Hk, T, D], not stored yet; return the keys and values to keep."""
        t = k.shape[2]
        index = torch.arange(t, device=k.device).expand(1, 1, -1)
        bias = None if queries.alibi is None else segment.bias(queries.alibi, 0, t)
        scores = self.scorer.score(queries, k, v, queries.visible, index, t, bias)
        self.scores.add(scores, queries.visible)
        self._note(segment, trace)
        slots, choice = self.choose(t, queries.visible)
        if slots is None:
            return k, v
        self._fill_ragged(k, v, choice, queries, trace)
        segment.note_kept(slots, t, self._needs_index(queries, trace))
        return self._renumbered_once(gather(k, slots), slots, t), gather(v, slots)

    def score_segment(self, segment: Segment, queries: Queries, seen: int) -> Tensor:
        """Return the scores fp32 [B, Hk, N] of a segment's exact tokens for a step's queries.

        Those of a repetition are of the prompt alone, as far as its tokens still exist.
        """
        if self.repetition is not None:
            assert self.repetition.scores is not None
            scores, self.repetition.scores = self.repetition.scores, None
            return scores[..., : len(segment)]
        keys, values = segment.exact_keys(), segment.exact_values()
        index = segment.step_index(keys.device)
        if self.renumbers_steps:
            assert self.rope is not None
            keys = renumber(self.rope, keys, index, seen - 1)
        bias = None if queries.alibi is None else segment.bias(queries.alibi, 0, keys.shape[2])
        visible = segment.mask(queries.visible)
        return self.scorer.score(queries, keys, values, visible, index, seen, bias)

    def note_repetition(
        self, segment: Segment, step: StepInputs, repeated: tuple[int, int]
    ) -> None:
        """Score a prompt's tokens repeated[0] to repeated[1] by a step whose end repeats them."""
        assert self.repetition is not None
        self.repetition.note(segment, step, repeated, self.scorer)

    def take_repetition(self, other: ScoreEvictor) -> None:
        """Take the scores of another evictor, whose cache holds the same prompt."""
        assert self.repetition is not None
        assert other.repetition is not None
        scores = other.repetition.scores
        self.repetition.scores = None if scores is None else scores.clone()

    def end_repetition(self, segment: Segment) -> None:
        """Give the tokens of a prompt that was not repeated equal scores."""
        assert self.repetition is not None
        if self.repetition.scores is None:
            keys = segment.exact_keys()
            self.repetition.scores = keys.new_zeros(keys.shape[:3], dtype=torch.float32)

    def score_slots(self, slots: SlotStorage, queries: Queries, part: Part) -> Tensor:
        """Return the scores fp32 [B, Hk, C] of all slots, which the step's query read as `part`."""
        assert isinstance(part.values, Tensor)
        return self.scorer.score(
            queries, part.exact_keys, part.values, part.visible, slots.index, slots.seen, part.bias
        )

    def evict_from_segment(
        self,
        segment: Segment,
        scores: Tensor,
        queries: Queries,
        trace: Trace | None,
        counts: Tensor | None = None,
    ) -> None:
        """Add a step's scores [B, Hk, N] and evict from a segment down to the budget.

        counts: int64 [B, Hk], how many tokens each head wins where heads of all layers compete for
        them (None: the scores of this layer decide alone).
        """
        visible, n = segment.mask(queries.visible), len(segment)
        self.scores.add(scores, visible)
        self._note(segment, trace)
        slots, choice = self.choose(n, visible, counts)
        if slots is not None:
            self._fill_ragged(segment.exact_keys(), segment.exact_values(), choice, queries, trace)
            segment.keep(slots, self._needs_index(queries, trace))
            tail = segment.keys.tail
            tail.replace(self._renumbered_once(tail.view(), slots, n))

    def evict_from_slots(
        self, slots: SlotStorage, scores: Tensor, visible: Tensor | None, trace: Trace | None
    ) -> None:
        """Add a step's scores [B, Hk, C] and free the slot of the token that is evicted."""
        total = self.scores.joined(slots.scores, scores)
        if trace is not None:
            trace.scored = slots.index.long(), total
        slots.evict(total, slots.mask(visible), slots.seen - self.recent)

    def next_storage(self, segment: Segment, drafting: bool) -> Storage:
        """Return where tokens are stored from now on: in slots once each step evicts one token."""
        if self.keep.when == "prompt":
            self.scores.clear()
            self.done = True
        elif self.keep.when == "step" and len(segment) == self.budget_tokens and not drafting:
            keys = segment.exact_keys()
            index = segment.step_index(keys.device).expand(*keys.shape[:3]).int()
            seen = segment.first + len(segment)
            storage = SlotStorage(keys, segment.exact_values(), self.scores.view(), index, seen)
            self.scores.clear()
            return storage
        return segment

    def in_segment(self, slots: SlotStorage) -> Segment:
        """Return the tokens of slots as a segment, oldest first."""
        keys, values, scores, index = slots.in_order()
        self.scores.replace(scores)
        return Segment.kept_of(keys, values, index, slots.seen)

    def choose(
        self, tokens: int, visible: Tensor | None, counts: Tensor | None = None
    ) -> tuple[Tensor | None, RaggedChoice | None]:
        """Return the slots int64 [B, Hk, M] of `tokens` tokens that stay; drop the other scores.

        Slots ascend, but for a retriever sinks come first and padding next. None: all tokens stay.
        Tokens newer than the scores stay: they follow the only prompt that is scored. The second
        value is the choice of `ragged`, where heads have different budgets. counts: int64 [B, Hk],
        how many tokens each head wins (None: the scores of this layer decide alone).
        """
        scores = self.scores.view()
        n, sinks = scores.shape[-1], scores == torch.inf
        best = choice = None
        if self.keep.drops(tokens):
            given = scores, self.heavy, self.recent, None if visible is None else visible[..., :n]
            if self.ragged is None:
                best = choose(*given)
            else:
                choice = self.ragged.choose(*given, counts)
                best = None if choice is None else choice.certain
        slots = None
        if best is not None:
            self.scores.keep(best)
            rest = torch.arange(n, tokens, device=best.device).expand(*best.shape[:2], -1)
            slots = torch.cat([best, rest], dim=-1)
        if not self.orders_sinks or visible is None:
            return slots, choice
        if slots is None:
            slots = torch.arange(tokens, device=visible.device).expand(*sinks.shape[:2], -1)
        later = sinks.new_zeros(*sinks.shape[:2], tokens - n)
        return sinks_first(slots, torch.cat([sinks, later], dim=2), visible), choice

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to the scores, along the batch dimension."""
        self.scores.map(fn)
        for part in self._parts:
            part.map(fn)

    def state(self) -> dict[str, Any]:
        """Return the tensors and plain data that `Cache.save` writes."""
        numbers = {name: getattr(self, name) for name in _STATE}
        ragged = None if self.ragged is None else self.ragged.state()
        scores = {"scores": self.scores.state(), "steps": self.scorer.steps}
        return {**scores, "ragged": ragged, **numbers}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned.

        like: an empty tensor [B, Hk, 0, D] with the dtype and device of the layer's keys.
        """
        self.scores.load_state(state["scores"])
        self.scorer.steps = state["steps"]
        for name in _STATE:
            setattr(self, name, state[name])
        if self.ragged is not None:
            self.ragged.load_state(state["ragged"], like)

    def _fill_ragged(
        self,
        k: Tensor,
        v: Tensor,
        choice: RaggedChoice | None,
        queries: Queries,
        trace: Trace | None,
    ) -> None:
        """Store the tokens that heads divided among them, of exact k, v [B, Hk, N, D]."""
        if self.ragged is not None and choice is not None:
            self.ragged.fill(k, v, choice, queries.visible, self._needs_index(queries, trace))

    def _renumbered_once(self, k: Tensor, slots: Tensor, tokens: int) -> Tensor:
        """Return k [B, Hk, M, D], kept at slots of `tokens` tokens, at their final positions."""
        if self.rope is None or self.renumbers_steps:
            return k
        return renumber_once(self.rope, k, slots, tokens)

    def _needs_index(self, queries: Queries, trace: Trace | None) -> bool:
        """Return whether padding, ALiBi, RoPE, a later eviction or a trace needs the indices."""
        masked = queries.visible is not None or queries.alibi is not None
        return masked or self.needs_positions or trace is not None or self.keep.when != "prompt"

    def _note(self, segment: Segment, trace: Trace | None) -> None:
        """Note the logical indices and scores [B, Hk, N] of the candidates in a trace."""
        if trace is not None:
            scores = self.scores.view().clone()
            index = segment.logical(0, scores.shape[-1], scores.device)
            trace.scored = index.expand_as(scores), scores


_STATE = ("heavy", "recent", "prompt_tokens", "done", "awaits_variances")
