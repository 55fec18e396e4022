"""The newest tokens of a layer whose commit waits: for a crop, or for the recipe's `start`.

`commit` and `LayerCache.crop` decide when it ends. Until then, the layer drops, packs and indexes
nothing. It keeps the queries that its parts will score with once it is certain which tokens stay.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..positions.alibi import Alibi
from ..state import Stateful
from .step import Queries


class Uncommitted(Stateful):
    """The number of these tokens, and their queries, where a part needs them (else none)."""

    tensors = ("q", "ids")
    uncounted = ("visible",)
    counters = ("tokens", "scale", "softcap")
    fixed = True  # a step replaces this object
    q: Tensor
    scale: float
    visible: Tensor | None
    softcap: float | None
    alibi: Alibi | None  # not saved: the next step brings its own
    ids: Tensor | None

    def __init__(self, tokens: int, queries: Queries) -> None:
        self.tokens = tokens
        self.q, self.scale, self.visible, self.softcap, self.alibi, self.ids, _ = queries

    @property
    def queries(self) -> Queries:
        """The queries of these tokens."""
        return Queries(self.q, self.scale, self.visible, self.softcap, self.alibi, self.ids)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        super().map(fn)
        self.alibi = None if self.alibi is None else self.alibi.map(fn)
