"""Eviction by age: the oldest tokens leave, except sinks, once a layer holds more than its budget.

Decides how many tokens leave.
"""

from __future__ import annotations

from typing import Any

from ..recipe.spec import Recipe


class AgeEvictor:
    """The budget of a layer whose `Keep` scores nothing."""

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.keep is not None
        self.recipe, self.keep = recipe, recipe.keep
        self.budget: int | None = None

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]

    @property
    def begun(self) -> bool:
        """Whether the budget is fixed."""
        return self.budget is not None

    def begin(self, prompt_tokens: int) -> None:
        """Fix the budget for a first prompt of this length."""
        self.budget = self.recipe.budget_tokens(prompt_tokens)

    def surplus(self, tokens: int) -> int:
        """Return how many of `tokens` tokens of the segment are over the budget."""
        sinks = self.recipe.protect.sinks
        if self.budget is None or not self.keep.drops(tokens + sinks):
            return 0
        return max(0, tokens - max(0, self.budget - sinks))

    def state(self) -> dict[str, Any]:
        """Return the state: see `LayerCache.state`."""
        return {"budget": self.budget}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `state`."""
        self.budget = state["budget"]
