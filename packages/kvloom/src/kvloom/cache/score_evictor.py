"""What evictors by score have in common: a budget, a scorer, and the wait for other scores.

Each strategy of `Keep.when` is an evictor of its own:

- `PromptEvictor` scores and evicts once, after the first prompt.
- `StepEvictor` scores every step, and evicts when there are more tokens than the budget, or than a
  limit.
- `BlockEvictor` scores a block of text once it is older than the recent tokens, and evicts from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..keep import PROTECTED, budgets
from ..keep.select import first_tokens
from ..kernels.attend.regions import Region
from ..positions.rope import Rope
from ..recipe.parts import BudgetGroup
from ..recipe.spec import Recipe
from .evictor import Evictor, Phase
from .scoring import RunningScores, StepScorer
from .segment import Segment
from .sinks import Sinks
from .slot_storage import Storage
from .step import KV, Queries, Trace


class Decision(NamedTuple):
    """What a layer evicts by.

    Attributes:
        queries: Those that an eviction needs: see `ScoreEvictor.needed`.
        scores: fp32 [B, Hk, N], of the oldest tokens of the storage.
        heavy: Heavy hitters that the layer keeps from now on (None: as before).
        counts: int64 [B, Hk], the tokens that each head wins where heads of all layers compete
            (None: its own scores decide).
        new: The keys and values of the tokens, if they are not stored yet (None: they are).
    """

    queries: Queries
    scores: Tensor
    heavy: int | None = None
    counts: Tensor | None = None
    new: KV | None = None


class ScoreEvictor(Evictor):
    """Drops the tokens of a layer with the lowest scores, down to its budget.

    Attributes:
        budget_group: The layer's place among the layers that divide a budget.
        rope: Rotates keys again where the recipe renumbers positions.
        scorer: What scores the layer's tokens; `layer` and `head` seed its noise.
        heavy: The heavy hitters of the budget; None: not known yet.
        recent: The newest tokens of the budget.
        prompt_tokens: The tokens of the first prompt; 0 before `set_budget`.
        pending_queries: The queries whose eviction waits for a repetition or for other layers.
        pending_scores: Their scores, in the phase DECIDING.
        protected: bool [B, 1, N], the tokens of a first prompt that the recipe marks, until they
            are scored.
        scores: The scores of all steps so far; None where each score is used once.
        sinks_store: The first tokens; None: they are in the segment, and their score is infinity.
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

    # --- what strategies differ in ----------------------------------------------------------------

    def score(
        self, storage: Storage, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
    ) -> Decision | None:
        """Score tokens that the layer has seen; None: the decision waits for more.

        new: keys and values of a prompt that the layer does not store before it evicts from it
        (None: all tokens are stored). regions: those that the step attended to.
        """
        raise NotImplementedError

    def evict(
        self, storage: Storage, decision: Decision, trace: Trace | None, recording: bool
    ) -> Storage:
        """Evict down to the budget, and pack what is due.

        recording: a crop may follow. Returns where tokens are stored from now on.
        """
        raise NotImplementedError

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

        variances: those of each layer's scores (None: the recipe does not divide by variance).
        """
        place, size = self.budget_group
        return self.keep.budget.heavy(self.prompt_tokens, size, variances)[place]

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
        # a repetition does not score later tokens
        return scores.masked_fill(protected[..., : scores.shape[-1]], PROTECTED)

    def wait(self, phase: Phase, queries: Queries, scores: Tensor | None = None) -> None:
        """Begin to wait for a repetition, or with `scores` for other layers."""
        self.phase, self.pending_queries, self.pending_scores = phase, queries, scores

    def vote(self, decision: Decision) -> None:
        """Wait with these scores for the other layers that decide together."""
        self.wait(Phase.DECIDING, decision.queries, decision.scores)

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
        return queries.for_fit(fit)

    def as_repeated(self, queries: Queries, k: Tensor) -> Queries:
        """Return a prompt's queries with `repeated` ones; k: its keys [B, Hk, N, D]."""
        assert queries.predictor is not None
        index = torch.arange(k.shape[2], device=k.device).view(1, 1, -1)
        if queries.visible is not None:
            index = (queries.visible.cumsum(dim=-1) - 1).clamp(min=0)
        repeated = queries.predictor(queries.q, k, self.scorer.rope, index)
        return queries._replace(repeated=repeated, predictor=None)

    def score_all(self, segment: Segment, queries: Queries, k: Tensor, v: Tensor) -> Tensor:
        """Return the scores fp32 [B, Hk, N] of k, v: all tokens of a segment, stored or not."""
        n = k.shape[2]
        index, visible = segment.logical(0, n, k.device), segment.mask(queries.visible, hi=n)
        bias = None if queries.alibi is None else segment.bias(queries.alibi, 0, n)
        step = self.scorer.step(queries, k, v, visible, index, segment.first + n, bias)
        return self.scorer.score(step)

    def sinks_among(
        self, segment: Segment, scores: Tensor, visible: Tensor | None, scored: int = 0
    ) -> Tensor | None:
        """Return which tokens with scores [B, Hk, N] are sinks, bool [B or 1, Hk or 1, N].

        visible: bool [B, 1, seen tokens] by logical index, False for padding. scored: the oldest
        tokens that have been here before. None: there are no sinks, or none among the others.
        """
        if not self.sinks or (visible is None and segment.first + scored >= self.sinks):
            return None
        index = segment.logical(0, scores.shape[-1], scores.device)
        if visible is None:
            return index < self.sinks
        first = first_tokens(visible.shape[-1], self.sinks, visible, visible.device)
        shape = torch.broadcast_shapes(index.shape[:2], first.shape[:2])
        return first.expand(*shape, -1).gather(2, index.expand(*shape, -1))


def note_scores(trace: Trace | None, segment: Segment, scores: Tensor) -> None:
    """Note the scores fp32 [B, Hk, N] of a segment's first tokens in the trace, if there is one."""
    if trace is not None:
        index = segment.logical(0, scores.shape[-1], scores.device)
        trace.scored = index.expand_as(scores), scores
