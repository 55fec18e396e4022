"""What a layer asks of its evictor, by age or by score.

Decides nothing. Where a step needs scores, `LayerState.score_evictor` is the evictor by score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .part import Part
from .ragged import RaggedTokens
from .slot_storage import Storage
from .step import Queries


class Evictor:
    """Drops tokens of a layer down to a budget. This base class answers as one without scores.

    ragged: the tokens of which heads have different numbers (None: budgets are equal). waiting: the
    queries whose eviction waits for other layers or for a repetition (None: none do). done: whether
    no more tokens are evicted.
    """

    ragged: RaggedTokens | None = None
    waiting: Queries | None = None
    done = False

    # --- what it needs --------------------------------------------------------------------------

    @property
    def sums_scores(self) -> bool:
        """Whether it adds up scores of steps, which a crop cannot subtract again."""
        return False

    @property
    def scores_steps(self) -> bool:
        """Whether the scores need the attention mass of decode steps."""
        return False

    @property
    def scores_more(self) -> bool:
        """Whether the queries of a draft will score."""
        return False

    @property
    def stores_first(self) -> bool:
        """Whether the tokens of a long step are stored unpacked before some are evicted.

        For the first prompt, `decides_later` says this.
        """
        return False

    @property
    def waits(self) -> bool:
        """Whether a decision needs the scores of other layers."""
        return False

    @property
    def awaits_repetition(self) -> bool:
        """Whether the model must repeat the first prompt, which scores its tokens."""
        return False

    @property
    def decides_later(self) -> bool:
        """Whether the layer stores a prompt exactly before it evicts some of it."""
        return False

    def decides(self, queries: Queries) -> bool:
        """Return whether scores of these queries, or of a repetition, decide what stays.

        Do not call this, or `surplus`, once the evictor is done.
        """
        return False

    # --- its budget -----------------------------------------------------------------------------

    @property
    def budget_tokens(self) -> int | None:
        """The most tokens that the layer keeps between steps; before `begin` None or 0."""
        raise NotImplementedError

    @property
    def begun(self) -> bool:
        """Whether the budget is set."""
        raise NotImplementedError

    def check_prompt(self, tokens: int) -> None:
        """Raise `RecipeError` if a first prompt is too short for the budgets of all layers."""

    def begin(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""
        raise NotImplementedError

    def surplus(self, tokens: int) -> int:
        """Return how many of the segment's `tokens` tokens are too old to stay."""
        return 0

    def renumbered(self, parts: list[Part], storage: Storage, newest: int) -> list[Part]:
        """Return the parts of a step, with keys at new positions if every step needs them.

        storage: of the parts. newest: the logical index of the step's newest token.
        """
        return parts

    # --- its tensors ----------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return 0

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        return [self]

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.saved_state`."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
        raise NotImplementedError
