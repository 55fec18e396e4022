"""Tokens that wait, exact, for their commit, while a model runs steps of one token.

Each layer writes them to slots behind its exact tokens, and counts none of them until
`LayerCache.commit_waiting`. So these steps run the same operations on the same tensors, and a CUDA
graph can replay them. Decides where tokens wait, and which of them a step sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .segment import Segment


class WaitingTokens:
    """What the layers of a cache share while up to `room` tokens wait.

    Attributes:
        room: The slots of each layer.
        slot: int64 [1], that of the step's token, 0 for the first; the caller sets it before each
            step.
        sees: bool [B, 1, room], the slots that the step's token sees: see `begin_step`.
        visible: bool [B, 1, N], of the N tokens before them, False for padding; None: no padding.
    """

    def __init__(
        self, room: int, batch: int, device: torch.device, visible: Tensor | None = None
    ) -> None:
        self.room, self.visible = room, visible
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.sees = torch.zeros(batch, 1, room, dtype=torch.bool, device=device)
        self._slots = torch.arange(room, device=device)

    def begin_step(self) -> None:
        """Set `sees` from `slot`, on the device; a recorded step begins with this."""
        self.sees.copy_((self._slots <= self.slot).expand_as(self.sees))

    def visible_after(self, tokens: int) -> Tensor | None:
        """Return `visible` of all tokens once the first `tokens` that wait are stored."""
        if self.visible is None:
            return None
        return torch.nn.functional.pad(self.visible, (0, tokens), value=True)

    def slots_of(self, segment: Segment) -> tuple[Tensor, Tensor]:
        """Return the slots of a segment for keys and for values [B, Hk, room, D]."""
        return segment.keys.tail.reserved(self.room), segment.values.tail.reserved(self.room)
