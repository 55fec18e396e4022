"""The queries of one step and how they attend.

Decides nothing: the model provides them, and every part of a layer reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..positions.alibi import Alibi


class StepInputs(NamedTuple):
    """One step's queries [B, Hq, T, D], which are the last T of `seen + T` tokens.

    visible: bool [B, 1, seen + T] by logical index, False for padding (None: no padding). alibi:
    of seen + T tokens. products: scale * q @ k, where attention left it (see `ops.step_mass`). ids:
    int64 [B, T], token ids, where a rule reads them.
    """

    q: Tensor
    scale: float
    softcap: float | None = None
    visible: Tensor | None = None
    alibi: Alibi | None = None
    products: Tensor | None = None
    ids: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, the number of queries in each row."""
        return self.q.shape[2]

    @property
    def visible_queries(self) -> Tensor | None:
        """`visible` of the queries' own tokens, bool [B, 1, T]."""
        return None if self.visible is None else self.visible[:, :, -self.tokens :]

    def without_queries(self) -> StepInputs:
        """Return the step without queries, for parts that do not score."""
        return self._replace(q=self.q[:, :, :0].clone(), products=None, ids=None)

    def after(self, earlier: StepInputs | None) -> StepInputs:
        """Return the step with the queries of an earlier step before its own."""
        if earlier is None:
            return self
        ids = None
        if self.ids is not None and earlier.ids is not None:
            ids = torch.cat([earlier.ids, self.ids], dim=1)
        return self._replace(q=torch.cat([earlier.q, self.q], dim=2), products=None, ids=ids)

    def without_newest(self, tokens: int) -> StepInputs:
        """Return the step without its newest `tokens` tokens."""
        left = max(0, self.tokens - tokens)
        q, ids = self.q[:, :, :left], None if self.ids is None else self.ids[:, :left]
        visible = self.visible
        visible = None if visible is None else visible[:, :, : visible.shape[2] - tokens]
        return self._replace(q=q, visible=visible, ids=ids)  # ALiBi may count from a removed token

    def map(self, fn: Callable[[Tensor], Tensor]) -> StepInputs:
        """Apply fn to the tensors, along the batch dimension."""
        visible = None if self.visible is None else fn(self.visible)
        alibi = None if self.alibi is None else self.alibi.map(fn)
        ids = None if self.ids is None else fn(self.ids)
        return self._replace(q=fn(self.q), visible=visible, alibi=alibi, products=None, ids=ids)
