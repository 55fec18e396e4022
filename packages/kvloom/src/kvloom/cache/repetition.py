"""Scores of a prompt's tokens while the model repeats them (KVzip).

Decides which of the stored tokens a chunk of repeated tokens is scored with: the sinks, the tokens
that the chunk repeats, and the chunk itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels.select.reference import gather
from .segment import Segment
from .step import StepInputs
from .step_scorer import StepScorer


class RepetitionScores:
    """The scores of a prompt's tokens, fp32 [B, Hk, P], collected chunk by chunk.

    sinks: the first tokens of the prompt that every chunk attends to. scores: None before the first
    chunk and after the eviction.
    """

    def __init__(self, sinks: int) -> None:
        self.sinks = sinks
        self.scores: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the scores."""
        return 0 if self.scores is None else self.scores.nbytes

    def note(
        self,
        segment: Segment,
        step: StepInputs,
        repeated: tuple[int, int],
        scorer: StepScorer,
    ) -> None:
        """Score the tokens from repeated[0] to repeated[1] of the P exact tokens of a prompt.

        step: T tokens that end with a repetition of these. scorer: of the layer.
        """
        queries, (lo, hi) = step.queries, repeated
        b, hk, prompt, _ = segment.exact_keys().shape
        device, t = step.k.device, step.tokens
        at, mask = self._slots(prompt, lo, hi, queries.visible, device)
        slots = at.expand(b, hk, -1)
        own = torch.arange(prompt, prompt + t, device=device)
        index = torch.cat([at, own.expand(*at.shape[:2], -1)], dim=2)
        k = torch.cat([gather(segment.exact_keys(), slots), step.k], dim=2)
        v = torch.cat([gather(segment.exact_values(), slots), step.v], dim=2)
        if mask is not None and queries.visible is not None:
            mask = torch.cat([mask, queries.visible[:, :, prompt:]], dim=2)
        bias = None if queries.alibi is None else queries.alibi.bias(index)
        scores = scorer.score(queries, k, v, mask, index, prompt + t, bias)
        if self.scores is None:
            self.scores = scores.new_zeros(b, hk, prompt)
        begin = at.shape[2] - (hi - lo)
        self.scores[:, :, lo:hi] = scores[:, :, begin : at.shape[2]]

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

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to the scores, along the batch dimension."""
        self.scores = None if self.scores is None else fn(self.scores)

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]
