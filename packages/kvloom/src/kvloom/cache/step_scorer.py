"""Calls a recipe's scorer for the steps of one layer.

Decides which number a step has and which seed its noise has; the scorer decides the scores.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..keep import Step, checked
from ..positions.rope import Rope
from .step import Queries


class StepScorer:
    """A scorer, and the number of steps of this layer that it has scored.

    group: how the query heads of a key/value head are joined. seed: of the noise, by layer. head:
    the model's number of the first key/value head, which seeds noise, too. rope: the model's rotary
    embedding, for scores that rotate keys.
    """

    def __init__(
        self,
        scorer: Callable[[Step], Tensor],
        group: str,
        seed: int,
        head: int,
        rope: Rope | None = None,
    ) -> None:
        self.scorer, self.group, self.seed, self.head = scorer, group, seed, head
        self.rope = rope
        self.steps = 0  # the prompt included

    def score(
        self,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        visible: Tensor | None,
        index: Tensor,
        seen: int,
        bias: Tensor | None,
    ) -> Tensor:
        """Return a step's scores fp32 [B, Hk, N] of k, v [B, Hk, N, D].

        visible: bool [B, 1 or Hk, N], False for padding. index: int [B or 1, Hk or 1, N], the
        logical index of each token. seen: the number of tokens seen, the step's included. bias:
        fp32 [B, Hq, N], added to the logits.
        """
        number, self.steps = self.steps, self.steps + 1
        step = Step(
            q=queries.q, k=k, v=v, scale=queries.scale, softcap=queries.softcap, visible=visible,
            visible_queries=queries.visible_queries, index=index, seen=seen, number=number,
            seed=self.seed, group=self.group, bias=bias, products=queries.products, rope=self.rope,
            head=self.head, ids=queries.ids,
        )  # fmt: skip
        return checked(self.scorer, step)
