"""What one layer stores: its tokens, and the optional parts that its recipe needs.

Decides which parts a recipe needs. `cycle`, `reading` and `commit` change them; `LayerCache` calls
these and undoes a step that fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..kernels import ops
from ..kernels.plan import OpPlan
from ..positions.rope import Rope
from ..recall import OffloadStore
from ..recipe.parts import BudgetGroup
from ..recipe.spec import Recipe
from ..state import Stateful
from ..store import KVSide, LayerFacts
from .block_evictor import BlockEvictor
from .evictor import AgeEvictor, Evictor
from .outliers import OutlierTokens
from .prompt_evictor import PromptEvictor
from .ragged import RaggedTokens
from .retriever import Retriever
from .score_evictor import ScoreEvictor
from .scoring import RepetitionScores
from .segment import Segment
from .sinks import Sinks
from .slot_storage import SlotStorage, Storage
from .step import Queries, Trace, Uncommitted
from .step_evictor import StepEvictor

VERSION = 14
"""The version of a saved state. Raise it when a key is added, removed or changes its meaning."""

_MOST_SEEN = 1 << 27  # tokens of a saved state: every step makes a mask of them

STRATEGIES: dict[str, type[ScoreEvictor]] = {
    "prompt": PromptEvictor,
    "step": StepEvictor,
    "limit": StepEvictor,
    "block": BlockEvictor,
}
"""The evictor of each `Keep.when`."""


class LayerState(Stateful):
    """The tokens of one layer, for all batch rows; the first keys set the number of heads.

    The arguments are those of `LayerCache`.

    Attributes:
        joint_layers: The layers that decide together, in the order in which a step runs them;
            empty where this one decides alone.
        trace: The decisions of each step; None if `observe` was not called.
        storage: What holds the tokens that neither `sinks` nor the evictor stores.
        sinks: The first tokens, where they are stored by themselves; else None.
        evictor: What drops tokens. This and the next two are None where the recipe has no such
            part.
        retriever: What finds the tokens that a step reads.
        outliers: The tokens of the first prompt that stay exact.
        uncommitted: The newest tokens while their commit waits; else None.
    """

    tensors = ("like",)
    counters = ("seen", "tokens_read", "recording", "prompt_done")
    children = ("storage", "sinks", "evictor", "retriever", "outliers", "uncommitted")

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        place: int,
        budget_group: BudgetGroup,
        rope: Rope | None,
        facts: LayerFacts,
        window: int | None = None,
    ) -> None:
        if recipe.store.pre_rope and facts.rope is None:
            raise CacheMisuse(
                f"{name}: keys before RoPE need the model's rotary embedding; give it as facts.rope"
            )
        self.recipe, self.name, self.place, self.budget_group = recipe, name, place, budget_group
        self.rope, self.facts, self.window = rope, facts, window
        sides = recipe.store.keys, recipe.store.values
        self.max_abs = tuple(torch.inf if fmt is None else fmt.max_abs for fmt in sides)
        self.joint_layers: Sequence[LayerState] = ()
        self.recording = False  # a crop may remove the tokens of each step
        self.trace: Trace | None = None
        self.plan = OpPlan(ops.attend)
        self.reset()

    def reset(self) -> None:
        """Remove all tokens."""
        recipe, facts, place = self.recipe, self.facts, self.place
        keep, recents, sinks = recipe.keep, recipe.protect.exact_recents, recipe.protect.sinks
        self.evictor: Evictor | None = None
        self.sinks = Sinks(sinks) if sinks else None
        if keep is not None and keep.by_age:
            self.evictor = AgeEvictor(recipe)
        elif keep is not None:
            ropes = self.rope, facts.rope
            evictor = STRATEGIES[keep.when](recipe, place, self.budget_group, *ropes, facts.head)
            self.evictor, self.sinks = evictor, evictor.sinks_store
        self.storage: Storage = Segment(
            KVSide(recipe.store.keys, recents[0], facts.keys, facts.rope),
            KVSide(recipe.store.values, recents[1], facts.values),
        )
        self.segment.first = 0 if self.sinks is None else sinks
        self.retriever = None if recipe.recall is None else Retriever(recipe, facts.latent)
        rule = recipe.protect.outliers
        self.outliers = None if rule is None else OutlierTokens(rule, sinks, place, facts.head)
        self.uncommitted: Uncommitted | None = None
        self.prompt_done = False  # whether the first prompt was stored
        self.seen = 0
        self.tokens_read: float = 0  # by the last step, of each row and head, on average
        self.like: Tensor | None = None  # an empty tensor with the keys' shape, dtype and device
        self.traits: tuple[Any, ...] = ()  # shape, dtype and device of the last keys
        if self.trace is not None:
            self.trace.scored = self.trace.recalled = None

    @property
    def segment(self) -> Segment:
        """The tokens, where they are not in slots."""
        assert isinstance(self.storage, Segment)
        return self.storage

    @property
    def score_evictor(self) -> ScoreEvictor:
        """The evictor, where it evicts by score."""
        assert isinstance(self.evictor, ScoreEvictor)
        return self.evictor

    @property
    def ragged(self) -> RaggedTokens | None:
        """The tokens of which heads have different numbers; None where heads have equally many."""
        return None if self.evictor is None else self.evictor.ragged

    @property
    def offload_store(self) -> OffloadStore | None:
        """Where a tier has its tokens; None without a tier, or before the prompt."""
        return None if self.retriever is None else self.retriever.store

    def forget_resident(self) -> None:
        """Forget a tier's copies on the device, which an undone step has changed in place."""
        if self.offload_store is not None:
            self.offload_store.forget()

    @property
    def repetition(self) -> RepetitionScores | None:
        """The scores of a repetition of the first prompt, which the model must run; None: none."""
        evictor = self.evictor
        return evictor.repetition if evictor is not None and evictor.scoring else None

    @property
    def needs_ids(self) -> bool:
        """Whether the next step needs token ids, for a rule that protects tokens."""
        if self.outliers is not None and self.outliers.reads_ids:
            return not self.outliers.done
        return not self.prompt_done and self.recipe.protect.reads_ids

    @property
    def dropped(self) -> float:
        """Tokens seen that the layer has dropped, of every row and head, or on average."""
        sinks = 0 if self.sinks is None else self.sinks.count
        return self.storage.first - sinks - (0 if self.ragged is None else self.ragged.mean)

    def hide_sinks(self, visible: Tensor | None) -> Tensor | None:
        """Return a mask [B, 1, tokens] without the sinks that are stored beside the segment."""
        return visible if self.sinks is None else self.sinks.hide(visible)

    @property
    def exact_until_commit(self) -> bool:
        """Whether the tail holds all stored tokens, exact, until a step commits."""
        evictor = self.evictor
        return self.recipe.store.exact and (evictor is None or evictor.scoring)

    def state(self) -> dict[str, Any]:
        """Return the state of the layer: views of its tensors, without spare room.

        Everything else follows from the recipe and the model.
        """
        in_slots, observed = isinstance(self.storage, SlotStorage), self.trace is not None
        return {**super().state(), "in_slots": in_slots, "observed": observed}

    def load_state(self, state: dict[str, Any], like: Tensor | None = None) -> None:
        """Load a state that `state` returned into an empty layer of the same recipe and model.

        The layer owns the tensors then, and continues exactly as the saved one. Raises `ValueError`
        for more tokens than any text has.
        """
        if not 0 <= state["seen"] <= _MOST_SEEN:
            raise ValueError(f"{state['seen']} tokens were seen")
        like = state["like"]
        if state["observed"] and self.trace is None:
            self.trace = Trace()
        if state["in_slots"]:
            self.storage = SlotStorage.empty(state["seen"])
        if state["uncommitted"] is not None:
            assert like is not None
            self.uncommitted = Uncommitted(0, Queries(like, 1.0))
        super().load_state(state, like)
