"""The running side of a `Keep`: one layer's scores, and the choice they make.

Decides when to score and how many of which tokens stay; `layer.LayerCache` asks and obeys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..keep import Keep, Step, budgets, choose, protect_sinks
from ..store.buffer import Buffer
from .segment import take


class Keeper:
    """Scores of the tokens a layer holds, fp32 [B, Hk, N], oldest first.

    place: (number of this layer, layers of the model).
    """

    def __init__(self, keep: Keep, sinks: int, place: tuple[int, int]) -> None:
        self.keep, self.sinks, self.place = keep, sinks, place
        self.scores = Buffer()
        self.heavy = self.recent = 0
        self.asked = 0  # observations made, the prompt's included
        self.done = False  # nothing more is dropped
        self.prompt_tokens = 0
        self.budget_waits = keep.budget.layers in budgets.BY_VARIANCE

    @property
    def nbytes(self) -> int:
        """Bytes of the scores held."""
        return self.scores.nbytes

    @property
    def waits(self) -> bool:
        """Whether a decision needs all layers' scores."""
        return self.keep.shared or self.budget_waits

    @property
    def room(self) -> int:
        """Tokens this layer holds at most between steps."""
        return self.heavy + self.recent

    def begin(self, prompt_tokens: int) -> None:
        """Fix this layer's budget, given the first prompt."""
        budget = self.keep.budget
        self.prompt_tokens = prompt_tokens
        self.recent = budget.window(prompt_tokens)
        if not self.budget_waits:
            self.divide(None)

    def divide(self, variances: list[float] | None) -> None:
        """Fix this layer's heavy hitters; variances: of each layer's scores, where they decide."""
        shares = self.keep.budget.heavy(self.prompt_tokens, self.place[1], variances)
        self.heavy, self.budget_waits = shares[self.place[0]], False

    def step(
        self,
        q: Tensor,
        k: Tensor,
        scale: float,
        softcap: float | None,
        see: Tensor | None,
        real: Tensor | None,
        index: Tensor,
        seen: int,
        bias: Tensor | None = None,
        products: Tensor | None = None,
    ) -> Tensor:
        """Score one step: fp32 [B, Hk, N] for q [B, Hq, T, D] over k [B, Hk, N, D].

        index: int32 or int64 [B or 1, Hk or 1, N], the tokens' places among the `seen` tokens.
        The others as in `Step`.
        """
        seed = (self.keep.seed * 1_009 + self.place[0]) % (1 << 32)  # so many bits are hashed
        number, self.asked = self.asked, self.asked + 1
        return self.keep.scorer(
            Step(
                q, k, scale, softcap, see, real, index, seen, number, seed, self.keep.group, bias,
                products,
            )
        )  # fmt: skip

    def observe(self, scores: Tensor, see: Tensor | None) -> None:
        """Add a step's scores [B, Hk, N] to those of the N - T tokens known so far."""
        known = len(self.scores)
        if known == 0:
            self.scores.replace(protect_sinks(scores, self.sinks, see).unsqueeze(-1))
            return
        held = torch.cat(
            [self.scores.view()[..., 0], torch.zeros_like(scores[..., known:])], dim=-1
        )
        self.scores.replace(self.add(held, scores).unsqueeze(-1))

    def add(self, held: Tensor, scores: Tensor) -> Tensor:
        """Scores after a step; plus infinity, which sinks have, stays."""
        joined = self.keep.scorer.join(held, scores)
        return torch.where(held == torch.inf, held, joined) if self.sinks else joined

    def choose(self, tokens: int, see: Tensor | None) -> Tensor | None:
        """Slots [B, Hk, M] of `tokens` tokens that stay, ascending, and their scores with them.

        None: all of them stay.
        Tokens newer than the scores all stay: they came after the only prompt that is scored.
        """
        if not self.keep.drops(tokens):
            return None
        scores = self.scores.view()[..., 0]
        n = scores.shape[-1]
        chosen = choose(scores, self.heavy, self.recent, None if see is None else see[..., :n])
        if chosen is None:
            return None
        self.scores.replace(take(self.scores.view(), chosen))
        rest = torch.arange(n, tokens, device=chosen.device).expand(*chosen.shape[:2], -1)
        return torch.cat([chosen, rest], dim=-1)

    def forget(self) -> None:
        """Hand the scores over."""
        self.scores = Buffer()

    def finish(self) -> None:
        """Forget the scores: nothing more is dropped."""
        self.forget()
        self.done = True

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to the scores, along the batch dimension."""
        self.scores.map(fn)
