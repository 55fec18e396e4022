"""What a layer asks of its evictor, by age or by score.

Decides nothing. Where a step needs scores, `LayerState.score_evictor` is the evictor by score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from .part import Part
from .ragged import RaggedTokens
from .segment import Segment
from .slots import Slots
from .step import Queries


class Evictor(Protocol):
    """Drops tokens of a layer down to a budget."""

    @property
    def ragged(self) -> RaggedTokens | None:
        """The tokens of which heads have different numbers; None where budgets are equal."""

    @property
    def waiting(self) -> Queries | None:
        """The queries whose eviction waits for other layers or for a repetition; None: none do."""

    @property
    def room(self) -> int | None:
        """The most tokens that the layer keeps between steps; before `begin` None or 0."""

    @property
    def begun(self) -> bool:
        """Whether the budget is set."""

    @property
    def done(self) -> bool:
        """Whether no more tokens are evicted."""

    @property
    def sums_scores(self) -> bool:
        """Whether it adds up scores of steps, which a crop cannot subtract again."""

    @property
    def scores_steps(self) -> bool:
        """Whether the scores need the attention mass of decode steps."""

    @property
    def scores_more(self) -> bool:
        """Whether the queries of a draft will score."""

    @property
    def stores_first(self) -> bool:
        """Whether a long step's tokens are stored, exact, before it evicts some."""

    @property
    def waits(self) -> bool:
        """Whether a decision needs the scores of other layers."""

    @property
    def awaits_repetition(self) -> bool:
        """Whether the model must repeat the first prompt, which scores its tokens."""

    @property
    def decides_later(self) -> bool:
        """Whether the layer stores a prompt exactly before it evicts some of it."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""

    def check_prompt(self, tokens: int) -> None:
        """Raise `RecipeError` if a first prompt is too short for the budgets of all layers."""

    def begin(self, prompt_tokens: int) -> None:
        """Set the budget for a first prompt of `prompt_tokens` tokens."""

    def decides(self, queries: Queries) -> bool:
        """Return whether scores of these queries, or of a repetition, decide what stays.

        Do not call this, or `surplus`, once the evictor is done.
        """

    def surplus(self, tokens: int) -> int:
        """Return how many of the segment's `tokens` tokens are too old to stay."""

    def renumbered(self, parts: list[Part], tokens: Segment | Slots, newest: int) -> list[Part]:
        """Return the parts of a step, with keys at new positions if every step needs them.

        newest: the logical index of the step's newest token.
        """

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""

    def state(self) -> dict[str, Any]:
        """Return the state, see `cache.saved_state`."""

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: an empty tensor such as the layer's keys."""
