"""What one layer stores: its tokens, and the optional parts that its recipe needs.

Decides which parts a recipe needs. `cycle`, `reading` and `commit` change them; `LayerCache` calls
these and undoes a step that fails.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import KVSide, LayerMetadata
from .age_evictor import AgeEvictor
from .coordinator import Coordinator
from .evictor import Evictor
from .outliers import OutlierTokens
from .part import AttendPlans
from .retriever import Retriever
from .score_evictor import ScoreEvictor
from .segment import Segment
from .sinks import Sinks
from .slot_storage import Storage
from .trace import Trace
from .uncommitted import Uncommitted


class LayerState:
    """The tokens of one layer, for all batch rows; the first keys set the number of heads.

    recipe, name, rank, budget_rank, rope, metadata: as for `LayerCache`. coordinator: of layers
    that decide together. trace: the decisions of each step; None if `observe` was not called.

    storage: of the tokens, a `Segment` or a `SlotStorage`. sinks, evictor, retriever, outliers:
    None where the recipe has none. uncommitted: the newest tokens while their commit waits.
    """

    def __init__(
        self,
        recipe: Recipe,
        name: str,
        rank: int,
        budget_rank: tuple[int, int],
        rope: Rope | None,
        metadata: LayerMetadata,
    ) -> None:
        if recipe.store.pre_rope and metadata.rope is None:
            raise CacheMisuse(
                f"{name}: keys before RoPE need the model's rotary embedding; give it as "
                "metadata.rope"
            )
        self.recipe, self.name, self.rank, self.budget_rank = recipe, name, rank, budget_rank
        self.rope, self.metadata = rope, metadata
        sides = recipe.store.keys, recipe.store.values
        self.max_abs = tuple(torch.inf if fmt is None else fmt.largest for fmt in sides)
        self.coordinator: Coordinator | None = None
        self.recording = False  # a crop may remove the tokens of each step
        self.trace: Trace | None = None
        self.plans = (AttendPlans(), AttendPlans())  # of the first two parts of a step
        self.reset()

    def reset(self) -> None:
        """Remove all tokens."""
        recipe, metadata, rank = self.recipe, self.metadata, self.rank
        keep, recents, sinks = recipe.keep, recipe.protect.recents, recipe.protect.sinks
        scored = keep is not None and not keep.by_age  # sinks stay in place: their score is inf
        self.storage: Storage = Segment(
            KVSide(recipe.store.keys, recents[0], metadata.keys, metadata.rope),
            KVSide(recipe.store.values, recents[1], metadata.values),
        )
        self.segment.first = 0 if scored else sinks
        self.sinks = Sinks(sinks) if sinks and not scored else None
        self.evictor: Evictor | None = None
        if scored:
            ropes = self.rope, metadata.rope
            self.evictor = ScoreEvictor(recipe, rank, self.budget_rank, *ropes, metadata.head)
        elif keep is not None:
            self.evictor = AgeEvictor(recipe)
        self.retriever = None if recipe.recall is None else Retriever(recipe)
        rule = recipe.protect.outliers
        self.outliers = None if rule is None else OutlierTokens(rule, rank, metadata.head)
        self.uncommitted: Uncommitted | None = None
        self.prompt_done = False  # whether the first prompt was stored
        self.seen = 0
        self.read: float = 0  # tokens that the last step read, of each row and head, on average
        self.like: Tensor | None = None  # an empty tensor with the keys' shape, dtype and device
        self.traits: tuple[Any, ...] = ()  # shape, dtype and device of the last keys

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
    def scores_repetition(self) -> bool:
        """Whether the model must repeat the first prompt, which scores its tokens."""
        return self.evictor is not None and self.evictor.awaits_repetition

    @property
    def needs_ids(self) -> bool:
        """Whether the next step needs token ids, for the rule that chooses outliers."""
        return self.outliers is not None and self.outliers.reads_ids and not self.outliers.done

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self.parts)

    @property
    def dropped(self) -> float:
        """Tokens seen that the layer has dropped, of every row and head, or on average."""
        sinks = 0 if self.sinks is None else self.sinks.count
        ragged = None if self.evictor is None else self.evictor.ragged
        return self.storage.first - sinks - (0 if ragged is None else ragged.mean)

    @property
    def exact_until_commit(self) -> bool:
        """Whether the tail holds all stored tokens, exact, until a step commits."""
        evictor = self.evictor
        return self.recipe.store.exact and (evictor is None or evictor.stores_first)

    @property
    def parts(self) -> list[Any]:
        """The parts with tensors."""
        parts = (
            self.storage, self.sinks, self.evictor, self.retriever, self.outliers,
            self.uncommitted,
        )  # fmt: skip
        return [part for part in parts if part is not None]

    @property
    def mutable(self) -> list[Any]:
        """The objects that a step changes."""
        objects = [self, *self.storage.mutable]
        for part in (self.sinks, self.evictor, self.retriever, self.outliers):
            if part is not None:
                objects += part.mutable
        return objects
