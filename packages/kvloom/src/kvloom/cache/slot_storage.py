"""A fixed number of exact tokens: each step evicts one token, and the next new one takes its slot.

Decides where tokens are stored, not which one is evicted. No tensor is concatenated: the
new token is written into the free slot, the step attends to all slots, and the slot of the
evicted token is free again. Each slot has the logical index of its token.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.append.reference import WriteTarget
from ..kernels.attend.regions import Region
from ..kernels.select.reference import gather
from ..positions.alibi import Alibi
from ..state import Stateful
from .segment import Segment


class SlotStorage(Stateful):
    """C slots [B, Hk, C, D], of which one is free between steps.

    seen: the number of tokens seen. scores: fp32 [B, Hk, C]. logical_index: int32 [B, Hk, C], the
    logical index of each slot's token.
    """

    tensors = ("keys", "values", "scores", "free", "logical_index")
    kept = 0  # tokens of a prompt that a crop cannot remove: see `Segment`

    def __init__(
        self, keys: Tensor, values: Tensor, scores: Tensor, index: Tensor, seen: int
    ) -> None:
        """Copy N tokens, oldest first, with their scores and indices, and add one free slot."""
        self.seen = seen
        b, h, n, _ = keys.shape
        self.keys, self.values = _one_more(keys), _one_more(values)
        self.scores = _one_more(scores.unsqueeze(-1)).squeeze(-1)
        self.free = torch.full((b, h, 1), n, device=keys.device)
        self.logical_index = _one_more(index.unsqueeze(-1)).squeeze(-1)

    def __len__(self) -> int:
        return self.keys.shape[2] - 1

    @property
    def first(self) -> int:
        """The number of tokens that were evicted."""
        return self.seen - len(self)

    @property
    def exact_newest(self) -> int:
        """The number of newest tokens with exact keys and values: all."""
        return len(self)

    def undoable(self) -> SlotStorage:
        """Return a copy: steps overwrite live tokens, which `Undo` cannot restore."""
        slots = copy(self)
        slots.map(Tensor.clone)
        return slots

    def append(self, k: Tensor, v: Tensor, max_abs: tuple[float, ...] | None = None) -> bool:
        """Write the next token k, v [B, Hk, 1, D] into the free slot.

        max_abs: the largest magnitudes of keys and of values that the formats can pack (None: not
        checked). Writes nothing and returns False if a magnitude exceeds `max_abs`.
        """
        targets = WriteTarget(self.keys, self.free), WriteTarget(self.values, self.free)
        if not ops.append((k, v), targets, max_abs):
            return False
        self.scores.scatter_(2, self.free, 0.0)
        self.logical_index.scatter_(2, self.free, self.seen)
        self.seen += 1
        return True

    def region(
        self, visible: Tensor | None, step_tokens: int = 1, alibi: Alibi | None = None
    ) -> Region:
        """Return all slots; visible: bool [B, 1, seen tokens] by logical index.

        step_tokens: tokens of the step itself: 1, which is in the slot that was free.
        """
        bias = None
        if alibi is not None:
            index = self.logical_index.long()
            if alibi.closed_up:  # no slot is free while a step attends
                index = alibi.position.shape[-1] - len(self) - 1 + index.argsort().argsort()
            bias = alibi.bias(index)
        mask = self.mask(visible)
        return Region.exact(
            self.keys, self.values, visible=mask, bias=bias, step_tokens=step_tokens
        )

    def mask(self, visible: Tensor | None) -> Tensor | None:
        """Return the mask by slot, bool [B, Hk, C]."""
        if visible is None:
            return None
        return visible.expand(-1, self.keys.shape[1], -1).gather(2, self.logical_index.long())

    def step_index(self, device: torch.device) -> Tensor:
        """Return the logical index of each slot while a step attends to all, int [B, Hk, C]."""
        return self.logical_index

    def logical(self) -> Tensor:
        """Return the logical indices of all tokens, int64 [B, Hk, C - 1], in no order."""
        b, h, c = self.logical_index.shape
        used = torch.arange(c, device=self.logical_index.device) != self.free
        return self.logical_index[used].view(b, h, c - 1).long()

    def evict(self, scores: Tensor, visible: Tensor | None, recent: int) -> None:
        """Free the slot with the lowest score among the tokens with an index below `recent`.

        scores: fp32 [B, Hk, C] after this step. visible: bool [B, Hk, C]; False is freed first.
        """
        self.scores = scores
        self.free = ops.lowest(scores, self.logical_index, recent, visible)

    def in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return keys, values, scores and indices of all tokens, oldest first."""
        order = self.logical_index.scatter(2, self.free, -1).argsort(dim=-1)[..., 1:]
        return (
            gather(self.keys, order),
            gather(self.values, order),
            self.scores.gather(2, order),
            self.logical_index.gather(2, order),
        )

    @classmethod
    def empty(cls, seen: int) -> SlotStorage:
        """Return slots without tensors, for `load_state`; seen: the number of tokens seen."""
        slots = cls.__new__(cls)
        slots.seen = seen
        return slots


Storage = Segment | SlotStorage
"""Where a layer stores its tokens."""


def _one_more(x: Tensor) -> Tensor:
    b, h, n, d = x.shape
    wider = x.new_zeros(b, h, n + 1, d)
    wider[:, :, :n] = x
    return wider
