"""Tokens of the first prompt that stay exact although the others are packed.

The rule (`keep.Outliers`) scores the first prompt once, with its queries. The packed tokens that it
marks are copied, exact, into a segment of their own and masked in the packed one, so that nothing
moves and no group has gaps. Decides when the rule runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..keep import Outliers, choose
from ..kernels.select.reference import gather
from ..positions.alibi import Alibi
from .part import Part
from .segment import Segment
from .sinks import Sinks
from .step import Queries
from .step_scorer import StepScorer


class OutlierTokens:
    """A rule, and exact copies of the tokens that it chose.

    layer, head: the numbers of the layer and of its first key/value head, which seed noise.
    """

    def __init__(self, rule: Outliers, layer: int, head: int = 0) -> None:
        self.rule, self.layer, self.head = rule, layer, head
        self.reads_ids = rule.reads_ids
        self.segment = Segment()
        self.done = False  # the rule runs once

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.segment.nbytes

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self, *self.segment.mutable]

    def choose(
        self, k: Tensor, v: Tensor, queries: Queries, packed: Segment, sinks: Sinks | None
    ) -> None:
        """Run the rule on all tokens seen, k, v [B, Hk, N, D]; `packed` has the oldest packed."""
        self.done = True
        lo, n = packed.first, k.shape[2]
        hi = lo + packed.packed_oldest
        if hi <= lo:
            return
        index = torch.arange(n, device=k.device).view(1, 1, -1)
        bias = None if queries.alibi is None else queries.alibi.bias(index)
        scorer = StepScorer(self.rule.scorer, self.rule.group, self.layer, self.head)
        scores = scorer.score(queries, k, v, queries.visible, index, n, bias)[..., lo:hi]
        visible = queries.visible if sinks is None else sinks.hide(queries.visible)
        visible = None if visible is None else visible[..., lo:hi]
        slots = choose(scores, min(self.rule.tokens, hi - lo), 0, visible)
        if slots is None:
            slots = torch.arange(hi - lo, device=k.device).expand(*scores.shape[:2], -1)
        slots = slots + lo
        self.segment.append(gather(k, slots), gather(v, slots))
        self.segment.index, self.segment.kept = slots.int(), slots.shape[-1]

    def parts(self, visible: Tensor | None, alibi: Alibi | None) -> list[Part]:
        """Return the exact copies as parts; none before the rule has run."""
        return [] if self.segment.index is None else self.segment.parts(visible, 0, alibi)

    def hide(self, visible: Tensor | None, seen: int) -> Tensor | None:
        """Return a mask bool [B, 1 or Hk, seen]: `visible` without tokens with exact copies."""
        if self.segment.index is None:
            return visible
        index = self.segment.index.long()
        b, hk = index.shape[:2]
        if visible is None:
            others = torch.ones(b, hk, seen, dtype=torch.bool, device=index.device)
        else:
            others = visible.expand(-1, hk, -1).clone()
        return others.scatter_(2, index, False)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        self.segment.map(fn)

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.saved_state`."""
        return {"tokens": self.segment.state(), "done": self.done}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        self.segment.load_state(state["tokens"], like)
        self.done = state["done"]
