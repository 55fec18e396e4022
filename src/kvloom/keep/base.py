"""How many tokens stay, and by which score the rest is chosen.

Decides the number to drop; the dropping itself is the segment's.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import RecipeError

SCORERS = {"recent": "the newest tokens stay"}


@dataclass(frozen=True)
class Budget:
    """How many tokens a layer holds: a number of tokens, or a fraction of the first prompt."""

    tokens: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.fraction is None):
            raise RecipeError("a budget is either tokens or a fraction of the prompt: give one")
        if self.tokens is not None and (type(self.tokens) is not int or self.tokens < 1):
            raise RecipeError(f"budget tokens={self.tokens!r} must be a whole number, 1 or more")
        number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if self.fraction is not None and not (number and 0 < self.fraction <= 1):
            raise RecipeError(f"budget fraction={self.fraction!r} must lie in (0, 1]")

    def resolve(self, prompt_tokens: int) -> int:
        """Tokens to hold, given the length of the first prompt (at least one)."""
        if self.tokens is not None:
            return self.tokens
        assert self.fraction is not None
        return max(1, int(prompt_tokens * self.fraction))


@dataclass(frozen=True)
class Keep:
    """Drop tokens at every step until the budget is met; protected sinks count in the budget."""

    budget: Budget
    scorer: str = "recent"

    def __post_init__(self) -> None:
        if self.scorer not in SCORERS:
            raise RecipeError(f"scorer={self.scorer!r} is not one of {', '.join(SCORERS)}")
