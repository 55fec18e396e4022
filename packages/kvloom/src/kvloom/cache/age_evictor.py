"""Eviction by age: a layer over its budget drops its oldest tokens, except sinks.

Decides how many tokens it drops.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..recipe.spec import Recipe
from .evictor import Evictor


class AgeEvictor(Evictor):
    """An evictor for a `Keep` that scores nothing; the budget includes the sinks."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.keep is not None
        self.recipe, self.keep = recipe, recipe.keep
        self._budget: int | None = None

    @property
    def budget_tokens(self) -> int | None:
        """The most tokens that the layer keeps between steps; None before `begin`."""
        return self._budget

    @property
    def begun(self) -> bool:
        """Whether the budget is set."""
        return self._budget is not None

    def begin(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        self._budget = self.recipe.budget_tokens(prompt_tokens)

    def surplus(self, tokens: int) -> int:
        """Return how many of the segment's `tokens` tokens exceed the budget."""
        sinks = self.recipe.protect.sinks
        if self._budget is None or not self.keep.drops(tokens + sinks):
            return 0
        return max(0, tokens - max(0, self._budget - sinks))

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.saved_state`."""
        return {"budget": self._budget}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; `like` is not needed."""
        self._budget = state["budget"]
