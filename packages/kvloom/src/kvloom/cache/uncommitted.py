"""The newest tokens of a layer whose commit waits: for a crop, or for the recipe's `start`.

`commit` and `LayerCache.crop` decide when it ends. Until then, the layer drops, packs and indexes
nothing. It keeps the queries that its parts will score with once it is certain which tokens stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .step import Queries


class Uncommitted:
    """The number of these tokens, and their queries, where a part needs them (else none)."""

    def __init__(self, tokens: int, queries: Queries) -> None:
        self.tokens, self.queries = tokens, queries

    @property
    def nbytes(self) -> int:
        """Bytes of the stored queries."""
        return self.queries.q.nbytes + (0 if self.queries.ids is None else self.queries.ids.nbytes)

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.saved_state`; the next step brings its own ALiBi."""
        return {"tokens": self.tokens, **{name: getattr(self.queries, name) for name in _STATE}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Uncommitted:
        """Return a draft with a state that `state` returned."""
        return cls(state["tokens"], Queries(**{name: state[name] for name in _STATE}))

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        self.queries = self.queries.map(fn)


_STATE = ("q", "scale", "softcap", "visible", "ids")
