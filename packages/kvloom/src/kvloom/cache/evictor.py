"""What a layer asks of its evictor, and eviction by age.

An evictor drops the tokens of a layer down to a budget. `Phase` says where it is in its life.
Those that decide by scores derive from `ScoreEvictor`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, ClassVar

from torch import Tensor

from ..kernels.attend.regions import Region
from ..recipe.spec import Recipe
from ..state import Stateful
from .ragged import RaggedTokens
from .scoring import RepetitionScores
from .slot_storage import Storage


class Phase(IntEnum):
    """The states of an evictor.

    EMPTY → EVICTING at the first prompt, which sets the budget. Where the model repeats the prompt,
    or layers decide together, EVICTING → REPEATING → DECIDING → EVICTING; no step may begin in the
    two phases between. → DONE after the only eviction of a `PromptEvictor`.
    """

    EMPTY = 0
    EVICTING = 1
    REPEATING = 2
    DECIDING = 3
    DONE = 4


class Evictor(Stateful):
    """Drops tokens of a layer down to a budget. The defaults are those without scores.

    recipe: the layer's recipe. ragged: the tokens of which heads have different numbers (None:
    budgets are equal). repetition: the scores of a repetition of the prompt (None: it is not
    repeated).
    """

    counters: ClassVar[tuple[str, ...]] = ("phase",)
    ragged: RaggedTokens | None = None
    repetition: RepetitionScores | None = None

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.keep is not None
        self.recipe, self.keep = recipe, recipe.keep
        self.phase = Phase.EMPTY

    @property
    def scoring(self) -> bool:
        """Whether scores decide which tokens stay, as long as tokens are evicted."""
        return False

    @property
    def waits_for_layers(self) -> bool:
        """Whether the next decision needs the scores of other layers."""
        return False

    @property
    def irreversible(self) -> bool:
        """Whether a step evicts tokens, or changes scores, in a way that no crop takes back."""
        return True

    @property
    def scores_steps(self) -> bool:
        """Whether the scores need the attention mass of decode steps."""
        return False

    @property
    def defers(self) -> bool:
        """Whether the layer stores a prompt exactly before it evicts some of it."""
        return False

    @property
    def budget_tokens(self) -> int | None:
        """The most tokens that the layer keeps between steps; None where it is not known yet."""
        raise NotImplementedError

    def check_prompt(self, tokens: int) -> None:
        """Raise `RecipeError` if a first prompt is too short for the budgets of all layers."""

    def set_budget(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        raise NotImplementedError

    def surplus(self, tokens: int) -> int:
        """Return how many of the segment's `tokens` tokens are dropped for their age."""
        return 0

    def in_segment(self, storage: Storage) -> Storage:
        """Return the tokens of a storage as a segment, for a step that slots cannot take."""
        return storage

    def forget(self, tokens: int) -> None:
        """Drop what is held of the newest `tokens` committed tokens, which a crop removes."""

    def renumbered(self, regions: list[Region], storage: Storage, newest: int) -> list[Region]:
        """Return the regions of a step, with keys at new positions if every step needs them.

        storage: what holds the layer's tokens. newest: the logical index of the newest token.
        """
        return regions

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: see `Stateful`."""
        super().load_state({**state, "phase": Phase(state["phase"])}, like)


class AgeEvictor(Evictor):
    """Drops the oldest tokens but the sinks, which the budget includes.

    budget: tokens; None before `set_budget`.
    """

    counters = (*Evictor.counters, "budget")

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.budget: int | None = None

    @property
    def budget_tokens(self) -> int | None:
        """The most tokens that the layer keeps between steps; None before `set_budget`."""
        return self.budget

    def set_budget(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        self.budget, self.phase = self.recipe.budget_tokens(prompt_tokens), Phase.EVICTING

    def surplus(self, tokens: int) -> int:
        """Return how many of the segment's `tokens` tokens exceed the budget."""
        sinks = self.recipe.protect.sinks
        if self.budget is None or not self.keep.drops(tokens + sinks):
            return 0
        return max(0, tokens - max(0, self.budget - sinks))
