"""The scores of one layer's tokens: of a step, of all steps so far, and of a repeated prompt.

Numbers the steps, seeds their noise, adds a step's scores to the earlier ones, and gives sinks the
highest score. The scorer decides the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..keep import PROTECTED, Budget, Keep, Scorer, Step, built_in, checked
from ..kernels.select.reference import gather
from ..positions.rope import Rope
from ..state import Stateful
from ..store.buffer import Buffer
from .latents import query_keys
from .segment import Segment
from .step import Queries, StepInputs


class StepScorer(Stateful):
    """A scorer, and the number of steps of this layer that it has scored.

    Attributes:
        query_heads: How the scores of a key/value head's query heads are joined.
        sinks: How many first tokens the recipe protects.
        seed: The seed of the noise of this layer.
        head: The model's number of the first key/value head, which seeds noise, too.
        rope: The model's rotary embedding, for scores that rotate keys.
        steps: The number of steps scored so far, the prompt included.
    """

    counters = ("steps",)

    def __init__(
        self,
        scorer: Callable[[Step], Tensor],
        query_heads: str,
        sinks: int,
        seed: int,
        head: int,
        rope: Rope | None = None,
    ) -> None:
        self.scorer, self.query_heads, self.sinks = scorer, query_heads, sinks
        self.seed, self.head, self.rope = seed, head, rope
        self.built_in = built_in(scorer)  # then its scores need no check
        self.steps = 0

    def score(self, step: Step) -> Tensor:
        """Return the scores fp32 [B, Hk, N] of a step that `step` returned."""
        self.steps += 1
        return self.scorer(step) if self.built_in else checked(self.scorer, step)

    def step(
        self,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        index: Tensor,
        seen: int,
        bias: Tensor | None,
    ) -> Step:
        """Return the input of `score` for queries, which may be absorbed, and k, v [B, Hk, N, D].

        visible: bool [B, 1 or Hk, N], False for padding. index: int [B or 1, Hk or 1, N], the
        logical index of each token. seen: the number of tokens seen, the step's included. bias:
        fp32 [B, Hq, N], added to the logits.
        """
        k = query_keys(queries.q, k, v)
        return Step(
            q=queries.q, k=k, v=v, scale=queries.scale, index=index, seen=seen, number=self.steps,
            seed=self.seed, query_heads=self.query_heads, sinks=self.sinks, softcap=queries.softcap,
            visible=visible, visible_queries=queries.visible_queries, bias=bias,
            products=queries.products, lse=queries.lse, repeated=queries.repeated, rope=self.rope,
            head=self.head, **queries.by_query,
        )  # fmt: skip


class RunningScores(Buffer):
    """Scores fp32 [B, Hk, N, 1], oldest token first; sinks have plus infinity.

    scorer: joins the scores of a step to those before. sinks: whether there are any.
    protects_tokens: whether tokens may have the score `PROTECTED`.
    """

    def __init__(self, scorer: Scorer, sinks: bool, protects_tokens: bool = False) -> None:
        super().__init__()
        self.scorer = scorer
        self.fixed_from = PROTECTED if protects_tokens else torch.inf
        self.fixes = sinks or protects_tokens

    @property
    def scores(self) -> Tensor:
        """All scores [B, Hk, N]; a view."""
        return self.view()[..., 0]

    def add(self, scores: Tensor, sinks: Tensor | None) -> None:
        """Add a step's scores [B, Hk, N] to those of the tokens stored before it.

        sinks: which tokens are sinks, bool [B or 1, Hk or 1, N]; None: no sink is new.
        """
        if before := len(self):
            new = torch.zeros_like(scores[..., before:])
            scores = self.with_step(torch.cat([self.scores, new], dim=-1), scores)
        self.put(scores if sinks is None else scores.masked_fill(sinks, torch.inf))

    def with_step(self, old: Tensor, scores: Tensor) -> Tensor:
        """Return scores after a step; sinks and protected tokens keep theirs."""
        joined = self.scorer.join(old, scores)
        return torch.where(old >= self.fixed_from, old, joined) if self.fixes else joined

    def keep(self, slots: Tensor) -> None:
        """Keep only the scores of the tokens at slots int64 [B, Hk, M]."""
        self.adopt(gather(self.view(), slots))

    def put(self, scores: Tensor) -> None:
        """Replace all scores by a copy of `scores` [B, Hk, N]."""
        self.replace(scores.unsqueeze(-1))


class RepetitionScores(Stateful):
    """The scores of a prompt's tokens, fp32 [B, Hk, P], collected chunk by chunk.

    scorer: the layer's scorer. sinks: the first tokens of the prompt that every chunk attends to.
    scores: None before the first chunk and after the eviction. rule: what, besides the prompt,
    decides the scores; the budget does not. Layers with equal rules get equal scores.
    """

    tensors = ("scores",)

    def __init__(self, keep: Keep, sinks: int, scorer: StepScorer) -> None:
        self.sinks, self.scorer = sinks, scorer
        self.rule = replace(keep, budget=Budget(tokens=1)), sinks
        self.scores: Tensor | None = None

    def copy_scores(self, scores: Tensor | None) -> None:
        """Take the scores of another layer with the same prompt and an equal rule."""
        self.scores = None if scores is None else scores.clone()

    def end(self, segment: Segment) -> None:
        """Give the tokens of a prompt that was not repeated equal scores."""
        if self.scores is None:
            keys = segment.exact_keys()
            self.scores = keys.new_zeros(keys.shape[:3], dtype=torch.float32)

    def pop(self, tokens: int) -> Tensor:
        """Return the scores of the first `tokens` tokens, and forget all scores."""
        assert self.scores is not None
        scores, self.scores = self.scores, None
        return scores[..., :tokens]

    def note(self, segment: Segment, step: StepInputs, repeated: tuple[int, int]) -> None:
        """Score the tokens from repeated[0] to repeated[1] of the P exact tokens of a prompt.

        step: T tokens that end with a repetition of these.
        """
        queries, (lo, hi) = step.queries, repeated
        b, hk, prompt, _ = segment.exact_keys().shape
        device, t = step.k.device, step.tokens
        stored, mask = self._slots(prompt, lo, hi, queries.visible, device)
        slots = stored.expand(b, hk, -1)
        new = torch.arange(prompt, prompt + t, device=device)
        index = torch.cat([stored, new.expand(*stored.shape[:2], -1)], dim=2)
        k = torch.cat([gather(segment.exact_keys(), slots), step.k], dim=2)
        v = torch.cat([gather(segment.exact_values(), slots), step.v], dim=2)
        if mask is not None and queries.visible is not None:
            mask = torch.cat([mask, queries.visible[:, :, prompt:]], dim=2)
        bias = None if queries.alibi is None else queries.alibi.bias(index)
        scores = self.scorer.score(self.scorer.step(queries, k, v, mask, index, prompt + t, bias))
        if self.scores is None:
            self.scores = scores.new_zeros(b, hk, prompt)
        begin = stored.shape[2] - (hi - lo)
        self.scores[:, :, lo:hi] = scores[:, :, begin : stored.shape[2]]

    def _slots(
        self, prompt: int, lo: int, hi: int, visible: Tensor | None, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Return the slots of the sinks before lo and of the tokens lo to hi, and their mask.

        Both [B or 1, 1, M]; a row's sinks are its first tokens that are not padding.
        """
        chunk = torch.arange(lo, hi, device=device)
        if visible is None:
            sinks = torch.arange(min(self.sinks, lo), device=device)
            return torch.cat([sinks, chunk]).expand(1, 1, -1), None
        first = visible[:, 0, :prompt].int().argmax(dim=-1, keepdim=True)  # [B, 1]
        places = first + torch.arange(self.sinks, device=device)
        slots = torch.cat([places.clamp(max=prompt - 1), chunk.expand(len(first), -1)], dim=1)
        mask = visible[:, 0].gather(1, slots)
        mask[:, : self.sinks] &= places < lo
        return slots[:, None], mask[:, None]
