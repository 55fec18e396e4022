"""Tokens of the first prompt that stay exact although the others are packed.

The rule (`keep.Outliers`) scores the first prompt once, with its queries. The packed tokens that it
marks are copied, exact, into a segment of their own and masked in the packed one, so that nothing
moves and no group has gaps. Decides when the rule runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..keep import Outliers, choose
from ..kernels.attend.regions import Region
from ..kernels.select.reference import gather
from ..positions.alibi import Alibi
from ..state import Stateful
from .scoring import StepScorer
from .segment import Segment
from .sinks import Sinks
from .step import Queries


class OutlierTokens(Stateful):
    """A rule, and exact copies of the tokens that it chose.

    sinks: how many first tokens the recipe protects. layer, head: the numbers of the layer and of
    its first key/value head, which seed noise.
    """

    counters = ("done",)
    children = ("tokens",)

    def __init__(self, rule: Outliers, sinks: int, layer: int, head: int = 0) -> None:
        self.rule, self.sinks, self.layer, self.head = rule, sinks, layer, head
        self.reads_ids = rule.reads_ids
        self.tokens = Segment()
        self.done = False  # the rule runs once

    def choose(
        self, k: Tensor, v: Tensor, queries: Queries, packed: Segment, sinks: Sinks | None
    ) -> None:
        """Run the rule on all tokens seen, k, v [B, Hk, N, D]; `packed` has the oldest packed."""
        lo, n = packed.first, k.shape[2]
        hi = lo + packed.packed_oldest
        if hi <= lo:
            return
        index = torch.arange(n, device=k.device).view(1, 1, -1)
        bias = None if queries.alibi is None else queries.alibi.bias(index)
        rule = self.rule
        scorer = StepScorer(rule.scorer, rule.query_heads, self.sinks, self.layer, self.head)
        step = scorer.step(queries, k, v, queries.visible, index, n, bias)
        scores = scorer.score(step)[..., lo:hi]
        visible = queries.visible if sinks is None else sinks.hide(queries.visible)
        visible = None if visible is None else visible[..., lo:hi]
        slots = choose(scores, min(rule.tokens, hi - lo), 0, visible)
        if slots is None:
            slots = torch.arange(hi - lo, device=k.device).expand(*scores.shape[:2], -1)
        slots = slots + lo
        self.tokens.append(gather(k, slots), gather(v, slots))
        self.tokens.logical_index, self.tokens.kept = slots.int(), slots.shape[-1]

    def regions(self, visible: Tensor | None, alibi: Alibi | None) -> list[Region]:
        """Return the exact copies; none before the rule has run."""
        return [] if self.tokens.logical_index is None else [self.tokens.region(visible, 0, alibi)]

    def hide(self, visible: Tensor | None, seen: int) -> Tensor | None:
        """Return a mask bool [B, 1 or Hk, seen]: `visible` without tokens with exact copies."""
        if self.tokens.logical_index is None:
            return visible
        index = self.tokens.logical_index.long()
        b, hk = index.shape[:2]
        if visible is None:
            mask = torch.ones(b, hk, seen, dtype=torch.bool, device=index.device)
        else:
            mask = visible.expand(-1, hk, -1).clone()
        return mask.scatter_(2, index, False)
