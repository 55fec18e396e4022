"""A fixed number of exact tokens, one of which gives its place to the next token at every step.

Decides where tokens lie, not which one goes. Nothing moves and nothing is concatenated: the new
token is written into the free slot, the step attends to all slots, and the slot of the token that
goes is free again. Each slot knows the logical index of its token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.append.reference import WriteTarget
from ..positions.alibi import Alibi
from .segment import Piece, take


class Slots:
    """C slots [B, Hk, C, D], of which one is free between steps.

    scores: fp32 [B, Hk, C]. index: int32 [B, Hk, C], logical index of each slot's token.
    """

    def __init__(self, keys: Tensor, values: Tensor, scores: Tensor, index: Tensor) -> None:
        """Take over N tokens, oldest first, their scores and indices; one slot more is made."""
        b, h, n, _ = keys.shape
        self.keys, self.values = _one_more(keys), _one_more(values)
        self.scores = _one_more(scores.unsqueeze(-1)).squeeze(-1)
        self.free = torch.full((b, h, 1), n, device=keys.device)
        self.index = _one_more(index.unsqueeze(-1)).squeeze(-1)

    def __len__(self) -> int:
        return self.keys.shape[2] - 1

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        held = (self.keys, self.values, self.scores, self.free, self.index)
        return sum(t.nbytes for t in held)

    def append(
        self, k: Tensor, v: Tensor, logical: int, most: tuple[float, ...] | None = None
    ) -> bool:
        """Write one token k, v [B, Hk, 1, D] with this logical index into the free slot.

        Or nothing that counts, where numbers are above `most`, as in `Segment.append`.
        """
        rooms = WriteTarget(self.keys, self.free), WriteTarget(self.values, self.free)
        if not ops.append((k, v), rooms, most):
            return False
        self.scores.scatter_(2, self.free, 0.0)
        self.index.scatter_(2, self.free, logical)
        return True

    def piece(self, valid: Tensor | None, alibi: Alibi | None = None) -> Piece:
        """All slots as one piece; valid: bool [B, 1, seen tokens] by logical index."""
        bias = None
        if alibi is not None:
            index = self.index.long()
            if alibi.closed_up:  # all slots are taken while a step attends to them
                index = alibi.position.shape[-1] - len(self) - 1 + index.argsort().argsort()
            bias = alibi.bias(index)
        return Piece(self.keys, self.values, self.see(valid), causal=1, bias=bias)

    def see(self, valid: Tensor | None) -> Tensor | None:
        """`valid` by slot, [B, Hk, C]."""
        if valid is None:
            return None
        return valid.expand(-1, self.keys.shape[1], -1).gather(2, self.index.long())

    def logical(self) -> Tensor:
        """Logical indices of the tokens held, int64 [B, Hk, C - 1], in no order."""
        b, h, c = self.index.shape
        taken = torch.arange(c, device=self.index.device) != self.free
        return self.index[taken].view(b, h, c - 1).long()

    def evict(self, scores: Tensor, see: Tensor | None, recent: int) -> None:
        """Free the slot with the lowest score among the tokens with an index below `recent`.

        scores: fp32 [B, Hk, C] after this step; see: bool [B, Hk, C], False slots go first.
        """
        self.scores = scores
        self.free = ops.lowest(scores, self.index, recent, see)

    def unroll(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, scores and index of the tokens held, oldest first."""
        order = self.index.scatter(2, self.free, -1).argsort(dim=-1)[..., 1:]
        return (
            take(self.keys, order),
            take(self.values, order),
            self.scores.gather(2, order),
            self.index.gather(2, order),
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        self.keys, self.values = fn(self.keys), fn(self.values)
        self.scores, self.free, self.index = fn(self.scores), fn(self.free), fn(self.index)


def _one_more(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    wider = x.new_zeros(b, h, n + 1, d)
    wider[:, :, :n] = x
    return wider
