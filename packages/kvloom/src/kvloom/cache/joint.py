"""Decisions that need the scores of several layers.

These are one choice of tokens for all layers, budgets by variance, and budgets for which all heads
of all layers compete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..keep import PROTECTED, head_budgets
from .score_evictor import Decision, ScoreEvictor


def decide(evictors: Sequence[ScoreEvictor]) -> list[Decision]:
    """Return what each layer evicts by, once all layers have voted; none waits any more.

    evictors: of the layers that decide together.
    """
    first, votes = evictors[0], [_vote(evictor) for evictor in evictors]
    if first.keep.shared:
        total = torch.stack([vote.to(votes[-1].device) for vote in votes]).sum(dim=0)
        votes = [total.to(vote.device) for vote in votes]
    heavy = [evictor.heavy for evictor in evictors]
    if first.heavy is None:
        free = [vote.masked_fill(vote >= PROTECTED, 0.0) for vote in votes]
        correction = min(1, free[0].shape[-1] - 1)  # one token has no variance
        variances = [vote.var(dim=-1, correction=correction).mean().item() for vote in free]
        heavy = [evictor.divided(variances) for evictor in evictors]
    counts: Sequence[Tensor | None] = [None] * len(votes)
    if first.divides_heads(votes[0].shape[-1]):
        counts = _divide_heads(evictors, votes)
    return [
        Decision(evictor.end_wait(), scores, tokens, by_head)
        for evictor, scores, tokens, by_head in zip(evictors, votes, heavy, counts, strict=True)
    ]


def _vote(evictor: ScoreEvictor) -> Tensor:
    assert evictor.pending_scores is not None, "a layer has not voted"
    return evictor.pending_scores


def _divide_heads(evictors: Sequence[ScoreEvictor], votes: Sequence[Tensor]) -> list[Tensor]:
    """Divide the tokens for which the heads of all layers compete.

    votes: the scores of each layer, fp32 [B, Hk, N]. Returns the number of tokens that each head
    wins, int64 [B, Hk], for each layer.
    """
    ranked, contested, unit = [], 0, 1
    for evictor, vote in zip(evictors, votes, strict=True):
        assert evictor.ragged is not None
        scores, tokens = evictor.ranked(vote)
        ranked.append(scores.to(votes[0].device))
        contested, unit = contested + tokens, evictor.ragged.unit
    heads = [scores.shape[1] for scores in ranked]
    counts = head_budgets.divide(torch.cat(ranked, dim=1), contested, unit)
    by_layer = counts.split(heads, dim=1)
    return [layer.to(vote.device) for layer, vote in zip(by_layer, votes, strict=True)]
