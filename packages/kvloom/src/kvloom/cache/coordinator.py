"""Decisions that need the scores of several layers.

These are one choice of tokens for all layers, budgets by variance, and budgets for which all heads
of all layers compete. Decides when all scores are there, and by which scores each layer evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..keep import head_budgets

if TYPE_CHECKING:
    from .layer_state import LayerState


class Decision(NamedTuple):
    """What a layer evicts by: scores fp32 [B, Hk, N], and the tokens that each of its heads wins.

    counts: int64 [B, Hk], where heads of all layers compete (else None).
    """

    layer: LayerState
    scores: Tensor
    counts: Tensor | None


class Coordinator:
    """The layers of a cache that decide together, in the order in which a step runs them.

    shared: the layers keep the same tokens, chosen by the sum of all scores.
    """

    def __init__(self, layers: Sequence[LayerState], shared: bool) -> None:
        self.layers, self.shared = layers, shared
        self.votes: list[Tensor] = []  # the scores of the first layers, in a step

    def vote(self, layer: LayerState, scores: Tensor) -> list[Decision]:
        """Note a layer's scores, fp32 [B, Hk, N].

        Returns the decisions for all layers after the last layer's vote, and none before.
        """
        if layer is self.layers[0]:
            self.votes = []  # a step that failed may have left some
        self.votes.append(scores)
        if layer is not self.layers[-1]:
            return []
        votes, self.votes = self.votes, []
        evictors = [each.score_evictor for each in self.layers]
        if self.shared:
            total = torch.stack([vote.to(scores.device) for vote in votes]).sum(dim=0)
            votes = [total.to(vote.device) for vote in votes]
        if evictors[0].awaits_variances:
            variances = [vote.var(dim=-1).mean().item() for vote in votes]
            for evictor in evictors:
                evictor.divide(variances)
        counts: Sequence[Tensor | None] = [None] * len(votes)
        if evictors[0].joint and evictors[0].budget_tokens < votes[0].shape[-1]:
            counts = _divide_heads(self.layers, votes)
        return [Decision(*each) for each in zip(self.layers, votes, counts, strict=True)]


def _divide_heads(layers: Sequence[LayerState], votes: Sequence[Tensor]) -> list[Tensor]:
    """Divide the tokens for which the heads of all layers compete.

    votes: the scores of each layer, fp32 [B, Hk, N]. Returns the number of tokens that each head
    wins, int64 [B, Hk], for each layer.
    """
    ranked, contested, unit = [], 0, 1
    for layer, vote in zip(layers, votes, strict=True):
        evictor = layer.score_evictor
        assert evictor.ragged is not None
        assert evictor.waiting is not None
        visible = evictor.waiting.visible
        scores, tokens = evictor.ragged.ranked(vote, evictor.heavy, evictor.recent, visible)
        ranked.append(scores.to(votes[0].device))
        contested, unit = contested + tokens, evictor.ragged.unit
    heads = [scores.shape[1] for scores in ranked]
    counts = head_budgets.divide(torch.cat(ranked, dim=1), contested, unit)
    by_layer = counts.split(heads, dim=1)
    return [its.to(vote.device) for its, vote in zip(by_layer, votes, strict=True)]
