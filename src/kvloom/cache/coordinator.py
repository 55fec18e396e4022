"""Decisions that need the scores of several layers: one choice for all, or budgets by variance.

Decides when all scores are there, and by which scores each layer evicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .score_evictor import ScoreEvictor


class Layer(Protocol):
    """A layer that evicts by score."""

    @property
    def score_evictor(self) -> ScoreEvictor: ...  # noqa: D102


class Coordinator:
    """The layers of a cache that decide together; the last layer of a step evicts from all.

    shared: the layers keep the same tokens, chosen by the sum of all scores. evict: a function that
    evicts from a layer by scores.
    """

    def __init__(self, shared: bool, evict: Callable[[Any, Tensor], None]) -> None:
        self.shared, self.evict = shared, evict
        self.layers: Sequence[Layer] = ()

    def vote(self, layer: Layer, scores: Tensor) -> None:
        """Note a layer's scores, fp32 [B, Hk, N]; after the last layer's, evict from all layers."""
        evictors = [each.score_evictor for each in self.layers]
        layer.score_evictor.vote = scores
        if layer is not self.layers[-1]:
            return
        votes = [evictor.vote for evictor in evictors if evictor.vote is not None]
        if self.shared:
            total = torch.stack([vote.to(scores.device) for vote in votes]).sum(dim=0)
            votes = [total.to(vote.device) for vote in votes]
        if evictors[0].awaits_variances:
            variances = [vote.var(dim=-1).mean().item() for vote in votes]
            for evictor in evictors:
                evictor.divide(variances)
        for each, vote in zip(self.layers, votes, strict=True):
            each.score_evictor.vote = None
            self.evict(each, vote)
