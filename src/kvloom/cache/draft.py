"""The newest tokens of a layer whose commit waits: for a crop, or for the recipe's `start`.

Decides nothing. While a layer has a draft, it drops, packs and indexes nothing. It keeps the
queries that its parts will score with once it is certain which tokens stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .step import StepInputs


class Draft:
    """The number of these tokens, and their step; with queries only where a part needs them."""

    def __init__(self, tokens: int, step: StepInputs) -> None:
        self.tokens, self.step = tokens, step

    @property
    def nbytes(self) -> int:
        """Bytes of the stored queries."""
        return self.step.q.nbytes + (0 if self.step.ids is None else self.step.ids.nbytes)

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.state`; the next step brings its own ALiBi."""
        names = ("q", "scale", "softcap", "visible", "ids")
        return {"tokens": self.tokens, **{name: getattr(self.step, name) for name in names}}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Draft:
        """Return a draft with a state that `state` returned."""
        names = ("q", "scale", "softcap", "visible", "ids")
        step = StepInputs(**{name: state[name] for name in names})
        return cls(state["tokens"], step)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        self.step = self.step.map(fn)
