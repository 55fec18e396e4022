"""Data of one step of one layer: its inputs, its uncommitted tokens, and the layer's decisions.

Decides nothing. A model gives a layer `StepInputs`. The keys and values are stored within the step;
the `Queries` may wait longer: in a draft (`Uncommitted`), or for the scores of other layers. A
score is called with the queries and with all tokens that they attended to: `keep.Step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..keep.fit import Fit
from ..keep.query_predictor import QueryPredictor
from ..positions.alibi import Alibi
from ..state import Stateful

_BY_QUERY = "ids", "norms", "later_seen"  # fields [B, T]; also of `keep.Step`
_SAVED = "q", "scale", "visible", "softcap", *_BY_QUERY  # the next step brings its own ALiBi


class Queries(NamedTuple):
    """One step's queries [B, Hq, T, D], which are the last T of seen + T tokens.

    Attributes:
        visible: bool [B, 1, seen + T] by logical index, False for padding (None: no padding).
        alibi: ALiBi for seen + T tokens, where the model has it.
        ids: int64 [B, T], token ids, where a rule reads them.
        products: scale * q @ k, if the attention kernel returned it (see `ops.step_mass`).
        lse: fp32 [B, Hq, T], the log-sum-exp of the logits, if the kernel of a prompt returned it.
        sink_logits: fp32 [Hq], of attention sinks, where the model has them; scores leave them out.
        norms: fp32 [B, T], the norm of the layer's input at each query, where a score reads it.
        later_seen: int64 [B, T], how many later tokens each query sees by a mask of the model, as
            those of an image do (None: none).
        sees_past: False where such a mask hides earlier tokens, which no score supports.
        predictor: Of a first prompt that is scored by what its queries would be in a repetition.
        repeated: [B, Hq, T, D], what they would be, as the predictor says.
    """

    q: Tensor
    scale: float
    visible: Tensor | None = None
    softcap: float | None = None
    alibi: Alibi | None = None
    ids: Tensor | None = None
    products: Tensor | None = None
    lse: Tensor | None = None
    sink_logits: Tensor | None = None
    norms: Tensor | None = None
    later_seen: Tensor | None = None
    sees_past: bool = True
    predictor: QueryPredictor | None = None
    repeated: Tensor | None = None

    @property
    def tokens(self) -> int:
        """T, the number of queries in each row."""
        return self.q.shape[2]

    @property
    def visible_queries(self) -> Tensor | None:
        """`visible` of the queries' own tokens, bool [B, 1, T]."""
        return None if self.visible is None else self.visible[:, :, -self.tokens :]

    @property
    def by_query(self) -> dict[str, Any]:
        """The tensors [B, T], by name."""
        return {name: getattr(self, name) for name in _BY_QUERY}

    @property
    def see_later(self) -> bool:
        """Whether a query sees tokens after its own."""
        return self.later_seen is not None and bool(self.later_seen.any())

    def for_fit(self, fit: Fit) -> Queries:
        """Return the queries to which values are fitted: see `Fit.sampled`."""
        q = self.q if self.repeated is None else self.repeated
        q = fit.sampled(q, self.visible_queries)
        return self._replace(q=q, products=None, lse=None, repeated=None)

    def slice(self, begin: int, end: int) -> Queries:
        """Return the queries begin to end, which see the tokens up to them; without products."""
        after = self.tokens - end
        visible, alibi = self.visible, self.alibi
        if visible is not None:
            visible = visible[:, :, : visible.shape[2] - after]
        if alibi is not None:
            position = alibi.position
            alibi = replace(alibi, position=position[..., : position.shape[-1] - after])
        return self._replace(
            visible=visible, alibi=alibi, products=None, lse=None,
            predictor=None if begin else self.predictor,
            **self._map_queries(lambda x: x[:, :, begin:end]),
            **self._map_by_query(lambda x: x[:, begin:end]),
        )  # fmt: skip

    def without_queries(self) -> Queries:
        """Return these without any query, where no part will score with them."""
        cleared = self._map_by_query(lambda _: None)
        q = self.q[:, :, :0].clone()
        return self._replace(q=q, products=None, lse=None, repeated=None, **cleared)

    def after(self, earlier: Queries) -> Queries:
        """Return the queries of an earlier step, and these after them."""
        q, before, joined = torch.cat([earlier.q, self.q], dim=2), earlier.by_query, self.by_query
        if earlier.later_seen is not None or self.later_seen is not None:
            before["later_seen"], joined["later_seen"] = earlier._later_seen, self._later_seen
        for name, x in joined.items():
            old = before[name]
            joined[name] = None if x is None or old is None else torch.cat([old, x], dim=1)
        repeated = earlier.repeated
        if repeated is not None:
            repeated = torch.cat([repeated, self.q], dim=2)
        return self._replace(q=q, products=None, lse=None, repeated=repeated, **joined)

    def without_newest(self, tokens: int) -> Queries:
        """Return the queries without those of the newest `tokens` tokens."""
        count = max(0, self.tokens - tokens)
        visible = self.visible
        visible = None if visible is None else visible[:, :, : visible.shape[2] - tokens]
        # ALiBi may count from a removed token
        return self._replace(
            visible=visible, lse=None, **self._map_queries(lambda x: x[:, :, :count]),
            **self._map_by_query(lambda x: x[:, :count]),
        )  # fmt: skip

    def map(self, fn: Callable[[Tensor], Tensor]) -> Queries:
        """Apply fn to the tensors, along the batch dimension; drop products and lse."""
        visible = None if self.visible is None else fn(self.visible)
        alibi = None if self.alibi is None else self.alibi.map(fn)
        return self._replace(
            visible=visible,
            alibi=alibi,
            products=None,
            lse=None,
            **self._map_queries(fn),
            **self._map_by_query(fn),
        )

    @property
    def _later_seen(self) -> Tensor:
        """`later_seen`, of zeros where it is None."""
        if self.later_seen is not None:
            return self.later_seen
        return self.q.new_zeros(self.q.shape[0], self.tokens, dtype=torch.long)

    def _map_queries(self, fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Apply fn to the queries [B, Hq, T, D], and to those that a repetition would have."""
        repeated = None if self.repeated is None else fn(self.repeated)
        return {"q": fn(self.q), "repeated": repeated}

    def _map_by_query(self, fn: Callable[[Tensor], Tensor | None]) -> dict[str, Any]:
        """Apply fn to the tensors [B, T]."""
        return {name: None if x is None else fn(x) for name, x in self.by_query.items()}


KV = tuple[Tensor, Tensor]
"""New keys and values [B, Hk, T, D] that are not stored yet."""


class StepInputs(NamedTuple):
    """What a model gives one layer in one step: its newest T of seen + T tokens.

    Attributes:
        queries: The queries of these tokens.
        k: New keys [B, Hk, T, D], which the layer has not stored yet.
        v: The values of the same tokens, [B, Hk, T, channels of a value].
        attended: Attention [B, Hq, T, D] that the model computes itself: of a first prompt over
            latents or by a mask that is not causal, and of several tokens in a sliding window.
        expand: For a layer of latents, returns the output of the heads [B, Hq, T, D] for attention
            to latents, [B, Hq, T, r].
    """

    queries: Queries
    k: Tensor
    v: Tensor
    attended: Tensor | None = None
    expand: Callable[[Tensor], Tensor] | None = None

    @property
    def tokens(self) -> int:
        """T, the number of new tokens in each row."""
        return self.k.shape[2]

    def slice(self, begin: int, end: int) -> StepInputs:
        """Return the tokens begin to end, which see the tokens up to them."""
        k, v = self.k[:, :, begin:end], self.v[:, :, begin:end]
        # later tokens of a prompt may see fewer tokens than the model did
        attended = None if self.attended is None or begin else self.attended[:, :, :end]
        return StepInputs(self.queries.slice(begin, end), k, v, attended, self.expand)

    def one_by_one(self) -> Iterator[StepInputs]:
        """Yield each token as a step of its own."""
        return (self.slice(i, i + 1) for i in range(self.tokens))

    def map(self, fn: Callable[[Tensor], Tensor]) -> StepInputs:
        """Apply fn to the tensors, along the batch dimension."""
        attended = None if self.attended is None else fn(self.attended)
        return StepInputs(self.queries.map(fn), fn(self.k), fn(self.v), attended, self.expand)


class Uncommitted(Stateful):
    """The newest tokens of a layer whose commit waits: for a crop, or for `compress_after`.

    Until then, the layer drops, packs and indexes nothing. tokens: The number of these
    tokens. queries: Their queries if a later score reads them, else empty.
    """

    counters = ("tokens",)
    fixed = True  # a step replaces this object

    def __init__(self, tokens: int, queries: Queries) -> None:
        self.tokens = tokens
        self.queries = queries._replace(products=None, lse=None, sink_logits=None)

    def held(self) -> Iterator[Tensor]:
        """Yield all tensors but the padding mask."""
        queries = self.queries
        held = (queries.q, queries.repeated, *queries.by_query.values())
        yield from (x for x in held if x is not None)

    def map(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        self.queries = self.queries.map(fn)

    def state(self) -> dict[str, Any]:
        """Return the state by name."""
        return {**super().state(), **{name: getattr(self.queries, name) for name in _SAVED}}

    def load_state(self, state: dict[str, Any], like: Tensor | None) -> None:
        """Load a state that `state` returned; like: see `Stateful`."""
        super().load_state(state, like)
        self.queries = Queries(**{name: state[name] for name in _SAVED})


@dataclass
class Trace:
    """Decisions of the last step.

    scored: logical indices int64 and scores fp32, both [B, Hk, N], of the evictor's candidates.
    recalled: slots int64 [B, H, M] of the segment that the retriever chose; None: it read all.
    """

    scored: tuple[Tensor, Tensor] | None = None
    recalled: Tensor | None = None
