"""ALiBi (arXiv:2108.12409): a bias on the logits, linear in the distance between query and key.

A constant added to a whole row does not change softmax, so the bias of a key is the same for all
queries: slope * (position - position of the newest token). Relative to the newest token it stays
exact in fp32 for sequences of any length. All parts of a step share this reference, so that their
states merge. Decides how positions follow from logical indices; independent of models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """One step's ALiBi: slopes fp32 [Hq], and the positions of the tokens seen so far.

    position: int64 [B, 1, seen + T], by logical index. closed_up: kept tokens have consecutive
    positions, as if evicted ones had never existed; callers of `bias` then give such indices.
    """

    slopes: Tensor
    position: Tensor
    closed_up: bool = False

    def bias(self, index: Tensor) -> Tensor:
        """Return the bias fp32 [B, Hq, N] of the tokens with these logical indices.

        index: int64 [B or 1, Hk or 1, N].
        """
        b, h = self.position.shape[0], index.shape[1]
        position = self.position.expand(-1, h, -1).gather(2, index.expand(b, -1, -1))
        slopes = self.slopes.view(h, -1, 1)  # [h, Hq / h, 1]
        newest = self.position[:, :, -1:, None]
        return self.times(slopes, position[:, :, None], newest).flatten(1, 2)

    def times(self, slopes: Tensor, position: Tensor, newest: Tensor) -> Tensor:
        """Return slopes * (position - newest); models that round it override this."""
        return slopes * (position - newest)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Alibi:
        """Apply fn to the positions, along the batch dimension."""
        return replace(self, position=fn(self.position))


def positions(visible: Tensor | None, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Return positions int64 [B, 1, tokens]: the number of tokens before each, without padding.

    visible: bool [B, tokens], False for padding (None: no padding).
    """
    if visible is None:
        return torch.arange(tokens, device=device).expand(batch, 1, -1)
    return visible.cumsum(dim=-1)[:, None] - 1
