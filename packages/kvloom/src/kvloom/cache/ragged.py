"""Tokens for which heads compete. Each head may keep a different number of them.

Decides how they are chosen and stored. Every head keeps equally many other tokens in the layer's
segment. A stored token never changes. So the tokens of all rows and heads lie one after the other,
without padding, and a table has each head's span.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..keep import head_budgets, protect_sinks
from ..keep.select import older
from ..kernels.attend.regions import Region, Spans
from ..recipe.spec import Recipe
from ..state import Stateful
from ..store import KVSide


class RaggedChoice(NamedTuple):
    """The tokens of a prompt that heads keep.

    guaranteed: int64 [B, Hk, M], ascending slots of the tokens that the segment keeps. contested:
    bool [B, Hk, N], the tokens that `RaggedTokens` stores; None where heads compete for none.
    counts: int64 [B, Hk], how many these are.
    """

    guaranteed: Tensor
    contested: Tensor | None
    counts: Tensor


class RaggedTokens(Stateful):
    """The tokens of one layer that heads compete for. Before they are stored, `spans` is None.

    spans: where the tokens of B rows and Hk heads are. logical_index: int32 [M], that of each token
    (None: no padding was among them, and no trace wants it).
    """

    tensors = ("bounds", "logical_index")
    children = ("keys", "values")

    def __init__(self, recipe: Recipe) -> None:
        keep, store = recipe.keep, recipe.store
        assert keep is not None
        assert keep.budget.head_share is not None
        self.head_share, self.unit = keep.budget.head_share, store.block_tokens
        self.sinks = recipe.protect.sinks
        self.keys, self.values = KVSide(store.keys), KVSide(store.values)
        self.spans: Spans | None = None
        self.logical_index: Tensor | None = None

    @property
    def bounds(self) -> Tensor | None:
        """The bounds of `spans`."""
        return None if self.spans is None else self.spans.bounds

    @property
    def stored(self) -> bool:
        """Whether heads have divided tokens among them."""
        return self.spans is not None

    @property
    def mean(self) -> float:
        """The tokens of a head, on average."""
        if self.spans is None:
            return 0
        return len(self.keys) / (self.spans.bounds.numel() // 2)

    def ranked(
        self, scores: Tensor, heavy: int, recent: int, visible: Tensor | None
    ) -> tuple[Tensor, int]:
        """Return the scores fp32 [B, Hk, M] of the tokens beside the guaranteed ones, descending.

        scores: fp32 [B, Hk, N], of a prompt's tokens. heavy: The mean number of heavy
        hitters per head. recent: the number of newest tokens, which stay without a
        competition. visible: bool [B, 1 or Hk, N or more], False for padding (None: no padding).
        The second value is how many of these tokens the heads of a row win together.
        """
        n = scores.shape[-1]
        visible = None if visible is None else visible[..., :n]
        of_older = older(protect_sinks(scores, self.sinks, visible), recent, visible)
        guaranteed, contested = self._shares(scores, heavy, recent)
        return of_older.sort(dim=-1, descending=True).values[..., guaranteed:], contested

    def _shares(self, scores: Tensor, heavy: int, recent: int) -> tuple[int, int]:
        """Return the guaranteed tokens of a head, and the contested ones of all heads of a row."""
        heads, n = scores.shape[1:]
        evicted = n - recent - heavy
        return head_budgets.shares(heavy, evicted, self.head_share, heads, self.unit)

    def choose(
        self,
        scores: Tensor,
        heavy: int,
        recent: int,
        visible: Tensor | None,
        counts: Tensor | None = None,
    ) -> RaggedChoice | None:
        """Return which tokens stay; None: all of them, in the segment.

        scores: fp32 [B, Hk, N], plus infinity for tokens that must stay. heavy: The mean number
        of heavy hitters per head. recent: the number of newest tokens, which stay.
        visible: bool [B, 1 or Hk, N], False for padding, which stays only where a row has too few
        other tokens. counts: int64 [B, Hk], how many contested tokens each head keeps (None: these
        scores decide).
        """
        b, hk, n = scores.shape
        if heavy + recent >= n:
            return None
        guaranteed, contested = self._shares(scores, heavy, recent)
        if counts is None:
            counts = head_budgets.divide(*self.ranked(scores, heavy, recent, visible), self.unit)
        best, next_best = head_budgets.select(older(scores, recent, visible), guaranteed, counts)
        newest = torch.arange(n - recent, n, device=scores.device).expand(b, hk, -1)
        return RaggedChoice(
            torch.cat([best, newest], dim=-1), next_best if contested else None, counts
        )

    def add(
        self,
        k: Tensor,
        v: Tensor,
        chosen: Tensor,
        counts: Tensor,
        first: int,
        visible: Tensor | None,
        index: bool,
    ) -> None:
        """Store chosen tokens of k, v [B, Hk, N, D] after those of each head, packed if it packs.

        chosen: bool [B, Hk, N], of each head `counts` int64 [B, Hk], whole units. first: the
        logical index of the first of the N tokens. visible: bool [B, 1, seen], False for padding.
        index: whether to remember the logical indices of the chosen tokens.
        """
        rows, _, slots = places = chosen.nonzero(as_tuple=True)
        logical = slots + first
        nonpadding = None if visible is None else visible[rows, 0, logical][None, None]
        older = 0 if self.spans is None else len(self.keys)
        self.keys.add(k[places][None, None], nonpadding)
        self.values.add(v[places][None, None], nonpadding)
        spans, before, known = Spans.of(counts), self.spans, self.logical_index
        if index:
            if known is None:  # no row had padding, so each sees its first token
                known = logical.new_zeros(older)
            logical = torch.cat([known, logical])
        self.spans, self.logical_index = spans, logical.int() if index else None
        if before is None:
            return
        starts = torch.stack([before.bounds[..., 0], older + spans.bounds[..., 0]], dim=-1)
        parts = torch.stack([before.bounds[..., 1], counts], dim=-1)
        self._take(_ranges(starts.flatten() // self.unit, parts.flatten() // self.unit))
        self.spans = Spans.of(parts.sum(dim=-1))

    def _take(self, units: Tensor) -> None:
        """Keep only some units of `unit` tokens, in a new order: see `KVSide.take`."""
        self.keys.take(units, self.unit)
        self.values.take(units, self.unit)
        if self.logical_index is not None:
            self.logical_index = self.logical_index.view(-1, self.unit)[units].flatten()

    def regions(self, visible: Tensor | None) -> list[Region]:
        """Return the tokens as a region; an empty list before they are stored.

        visible: bool [B, 1, seen] by logical index, False for padding.
        """
        if self.spans is None:
            return []
        mask = None
        if visible is not None and self.logical_index is not None:
            index = self.logical()
            mask = visible.expand(-1, index.shape[1], -1).gather(2, index.clamp_min(0))
        return [Region(self.keys.kv_view(), self.values.kv_view(), self.spans, mask)]

    def logical(self) -> Tensor:
        """Return each head's logical indices, int64 [B, Hk, longest]; -1 after its last token."""
        assert self.spans is not None
        assert self.logical_index is not None
        first, count = self.spans.bounds.split(1, dim=-1)  # [B, Hk, 1] each
        step = torch.arange(self.spans.longest, device=first.device)
        places = (first + step).clamp_max(len(self.logical_index) - 1)
        return self.logical_index.long()[places].masked_fill_(step >= count, -1)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn, which selects, repeats or reorders batch rows, to the rows."""
        if self.spans is None:
            return
        bounds = self.spans.bounds
        rows = fn(torch.arange(len(bounds), device=bounds.device))
        first, count = bounds[rows].flatten(0, 1).unbind(dim=-1)
        self._take(_ranges(first // self.unit, count // self.unit))
        self.spans = Spans.of(count.view(len(rows), -1))

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned.

        like: an empty tensor [B, Hk, 0, D] with the dtype and device of the layer's keys.
        """
        if state["bounds"] is None:
            return
        assert like is not None
        for name in ("keys", "values"):
            getattr(self, name).load_state(state[name], like[:1, :1])
        self.spans, self.logical_index = Spans.of(state["bounds"][..., 1]), state["logical_index"]


def _ranges(first: Tensor, count: Tensor) -> Tensor:
    """Return the numbers first[i] to first[i] + count[i] for each i, one after the other."""
    span = torch.arange(len(first), device=first.device).repeat_interleave(count)
    before = count.cumsum(dim=0) - count
    return torch.arange(len(span), device=first.device) - before[span] + first[span]
