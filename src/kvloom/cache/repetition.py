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


class Repetition:
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
        tokens: Segment,
        step: StepInputs,
        new: tuple[Tensor, Tensor],
        repeated: tuple[int, int],
        score: Callable[..., Tensor],
    ) -> None:
        """Score the tokens from repeated[0] to repeated[1] of the P exact tokens of a prompt.

        step: the queries of T tokens that end with a repetition of these; new: their keys and
        values [B, Hk, T, D]. score: `ScoreEvictor.score`.
        """
        lo, hi = repeated
        b, hk, prompt, _ = tokens.exact_keys().shape
        device, t = step.q.device, step.tokens
        at, see = self._slots(prompt, lo, hi, step.visible, device)
        slots = at.expand(b, hk, -1)
        own = torch.arange(prompt, prompt + t, device=device)
        index = torch.cat([at, own.expand(*at.shape[:2], -1)], dim=2)
        stored = (tokens.exact_keys(), tokens.exact_values())
        k, v = (torch.cat([gather(x, slots), y], 2) for x, y in zip(stored, new, strict=True))
        if see is not None and step.visible is not None:
            see = torch.cat([see, step.visible[:, :, prompt:]], dim=2)
        bias = None if step.alibi is None else step.alibi.bias(index)
        found = score(step, k, v, see, index, prompt + t, bias)
        if self.scores is None:
            self.scores = found.new_zeros(b, hk, prompt)
        begin = at.shape[2] - (hi - lo)
        self.scores[:, :, lo:hi] = found[:, :, begin : at.shape[2]]

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
        see = visible[:, 0].gather(1, slots)
        see[:, : self.sinks] &= places < lo
        return slots[:, None], see[:, None]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to the scores, along the batch dimension."""
        self.scores = None if self.scores is None else fn(self.scores)

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]
