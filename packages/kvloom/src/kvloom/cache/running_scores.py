"""The running score of each of a layer's tokens.

Decides how a step's scores join those before it, and that sinks keep the highest score of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..keep import Scorer, protect_sinks
from ..kernels.select.reference import gather
from ..store.buffer import Buffer


class RunningScores:
    """Scores fp32 [B, Hk, N], oldest token first; the first `sinks` tokens have plus infinity."""

    def __init__(self, scorer: Scorer, sinks: int) -> None:
        self.scorer, self.sinks = scorer, sinks
        self.buffer = Buffer()  # [B, Hk, N, 1]

    def __len__(self) -> int:
        return len(self.buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of the scores, spare room included."""
        return self.buffer.nbytes

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self.buffer]

    def view(self) -> Tensor:
        """Return all scores [B, Hk, N]; a view."""
        return self.buffer.view()[..., 0]

    def add(self, scores: Tensor, visible: Tensor | None) -> None:
        """Add a step's scores [B, Hk, N] to those of the tokens stored before it.

        visible: bool [B, 1 or Hk, N or more], False for padding, which is not a sink.
        """
        before = len(self)
        if before == 0:
            if visible is not None:
                visible = visible[..., : scores.shape[-1]]
            self.replace(protect_sinks(scores, self.sinks, visible))
            return
        new = torch.zeros_like(scores[..., before:])
        self.replace(self.joined(torch.cat([self.view(), new], dim=-1), scores))

    def joined(self, old: Tensor, scores: Tensor) -> Tensor:
        """Return scores after a step; sinks keep theirs."""
        joined = self.scorer.join(old, scores)
        return torch.where(old == torch.inf, old, joined) if self.sinks else joined

    def keep(self, slots: Tensor) -> None:
        """Keep only the scores of the tokens at slots int64 [B, Hk, M]."""
        self.buffer.replace(gather(self.buffer.view(), slots))

    def replace(self, scores: Tensor) -> None:
        """Replace all scores by a copy of `scores` [B, Hk, N]."""
        self.buffer.replace(scores.unsqueeze(-1))

    def clear(self) -> None:
        """Drop all scores."""
        self.buffer.clear()

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to the scores, along the batch dimension."""
        self.buffer.map(fn)

    def state(self) -> dict[str, Any] | None:
        """Return the state, see `cache.saved_state`."""
        return self.buffer.state()

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Load a state that `state` returned."""
        self.buffer.load_state(state)
