"""Eviction by age: a layer over its budget drops its oldest tokens, except sinks.

Decides how many tokens it drops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..recipe.spec import Recipe
from .part import Part
from .segment import Segment
from .slots import Slots
from .step import Queries


class AgeEvictor:
    """An `Evictor` for a `Keep` that scores nothing; room includes the sinks."""

    ragged = waiting = None
    done = sums_scores = scores_steps = scores_more = stores_first = False
    waits = awaits_repetition = decides_later = False
    nbytes = 0

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.keep is not None
        self.recipe, self.keep = recipe, recipe.keep
        self.room: int | None = None

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]

    @property
    def begun(self) -> bool:
        """Whether the budget is set."""
        return self.room is not None

    def check_prompt(self, tokens: int) -> None:
        """Do nothing: a prompt of any length fits the budget."""

    def begin(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        self.room = self.recipe.budget_tokens(prompt_tokens)

    def decides(self, queries: Queries) -> bool:
        """Return False: nothing is scored."""
        return False

    def surplus(self, tokens: int) -> int:
        """Return how many of the segment's `tokens` tokens exceed the budget."""
        sinks = self.recipe.protect.sinks
        if self.room is None or not self.keep.drops(tokens + sinks):
            return 0
        return max(0, tokens - max(0, self.room - sinks))

    def renumbered(self, parts: list[Part], tokens: Segment | Slots, newest: int) -> list[Part]:
        """Return the parts as they are: positions of a window follow from the order of tokens."""
        return parts

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Do nothing: there are no tensors."""

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.saved_state`."""
        return {"budget": self.room}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; `like` is not needed."""
        self.room = state["budget"]
