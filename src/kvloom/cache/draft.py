"""The newest tokens of a layer that a crop may still remove.

Decides nothing: while a draft is there, the layer drops, packs and indexes nothing, and keeps the
queries that parts of it will need once it is certain which tokens stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .step import StepInputs


class Draft:
    """So many newest tokens, and how they attended; the queries only where a part needs them."""

    def __init__(self, tokens: int, step: StepInputs) -> None:
        self.tokens, self.step = tokens, step

    @property
    def nbytes(self) -> int:
        """Bytes of the queries held."""
        return self.step.q.nbytes

    def state(self) -> dict[str, Any]:
        """Return the state: see `LayerCache.state`. ALiBi comes anew with the next step."""
        names = ("q", "scale", "softcap", "visible")
        return {"tokens": self.tokens, **{name: getattr(self.step, name) for name in names}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Draft:
        """Return a draft with a state of `state`."""
        step = StepInputs(state["q"], state["scale"], state["softcap"], state["visible"])
        return cls(state["tokens"], step)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor held, along the batch dimension."""
        self.step = self.step.map(fn)
