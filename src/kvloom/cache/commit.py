"""After attention: score → evict → pack → index.

Decides what happens to the tokens of a step, and in which order. A draft leaves this to `crop`.
Layers that decide together score one by one, and evict when the last of them has scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import CacheMisuse
from .draft import Draft
from .layer_state import LayerState
from .outliers import all_exact
from .part import Part, RaggedPart
from .segment import Segment
from .slot_storage import SlotStorage
from .step import Queries

KV = tuple[Tensor, Tensor]
"""New keys and values [B, Hk, T, D] that are not stored yet."""


def commit(
    state: LayerState, queries: Queries, new: KV | None, parts: Sequence[Part | RaggedPart]
) -> None:
    """Store a step's tokens, then score, evict, pack and index what is due.

    queries: of the step. new: its keys and values [B, Hk, T, D] if they are not stored yet (None:
    they were stored before attention). parts: the tokens that the step attended to.
    """
    evictor = state.evictor
    if evictor is not None and evictor.waiting is not None:
        raise CacheMisuse(
            f"{state.name}: the prompt waits for the scores of its repetition; run the layer by "
            "its model, which repeats the prompt"
        )
    if state.like is None:
        assert new is not None
        state.like = new[0].new_empty(*new[0].shape[:2], 0, new[0].shape[3])
    exact = state.seen <= state.recipe.start  # the whole context stays exact
    if evictor is not None and not evictor.begun and not exact:
        evictor.begin(state.seen)
    if state.retriever is not None:
        state.retriever.visible = queries.visible
    if state.recording or exact:
        _add_to_draft(state, queries, new)
    elif isinstance(state.storage, SlotStorage):
        part = parts[0]
        assert isinstance(part, Part)
        _vote(state, queries, state.score_evictor.score_slots(state.storage, queries, part))
    elif state.draft is not None:  # no crop followed the draft, so all of its tokens stay
        _add_to_draft(state, queries, new)
        settle(state, state.draft.queries, None)
    else:
        settle(state, queries, new)


def settle(state: LayerState, queries: Queries, new: KV | None) -> None:
    """Score, evict, pack and index the tokens of a step, or of a draft that has ended.

    queries: of the step, or of all steps of the draft. new: the keys and values of the step that
    are not stored yet (None: all are stored).
    """
    state.draft = None
    first, state.settled = not state.settled, True
    segment, evictor, retriever = state.storage, state.evictor, state.retriever
    assert isinstance(segment, Segment), "slots are settled at once"
    if retriever is not None and retriever.learns and queries.tokens:
        retriever.learn(queries, (new or all_exact(segment, state.sinks))[0])
    scores = evictor is not None and not evictor.done and evictor.decides(queries)
    if scores and (new is None or state.seen == new[0].shape[2]):
        _settle_scored(state, segment, queries, new)
        return
    _store(state, segment, queries, new, prompt=first)
    if retriever is not None:
        index(state)


def end_repetition(state: LayerState) -> None:
    """Evict by the scores of a repeated prompt; a draft leaves this to `crop`.

    A prompt that was not repeated has equal scores: nothing of it is evicted.
    """
    if not state.scores_repetition:
        return
    evictor = state.score_evictor
    evictor.end_repetition(state.segment)
    if evictor.waiting is not None:
        scores = evictor.score_segment(state.segment, evictor.waiting, state.seen)
        _vote(state, evictor.waiting, scores)


def evict(state: LayerState, scores: Tensor, counts: Tensor | None = None) -> None:
    """Evict by fp32 scores [B, Hk, N] of the queries that wait; then pack and index.

    counts: int64 [B, Hk], how many tokens each head wins where heads of all layers compete for
    them (None: the scores of this layer decide alone).
    """
    evictor, storage = state.score_evictor, state.storage
    queries, evictor.waiting = evictor.waiting, None
    assert queries is not None
    if isinstance(storage, SlotStorage):
        evictor.evict_from_slots(storage, scores, queries.visible, state.trace)
        return
    evictor.evict_from_segment(storage, scores, queries, state.trace, counts)
    state.storage = evictor.settled(storage, state.recording)
    if state.storage is storage:
        storage.pack(queries.visible, prompt=evictor.done)
        if evictor.done:
            storage.trim()
        index(state)


def index(state: LayerState) -> None:
    """Index the tokens that are due, and offload them where the recipe has a tier."""
    retriever = state.retriever
    if retriever is None:
        return
    assert state.like is not None
    visible = retriever.visible
    if visible is not None and state.sinks is not None:
        visible = state.sinks.hide(visible)
    retriever.grow(state.segment, visible, state.like)


def _settle_scored(state: LayerState, segment: Segment, queries: Queries, new: KV | None) -> None:
    """Score a segment and evict from it.

    new: keys and values of a prompt that is not stored yet (None: all tokens are stored).
    """
    evictor = state.score_evictor
    if new is not None and not evictor.decides_later:  # store only the tokens that stay
        kept = evictor.keep_prompt(segment, queries, *new, state.trace)
        segment.extend(*kept, 0, queries.visible)
        state.storage = evictor.settled(segment, drafting=False)
        index(state)
        return
    if new is not None:
        segment.append(*new)
    if evictor.repetition is None:
        _vote(state, queries, evictor.score_segment(segment, queries, state.seen))
    elif evictor.repetition.scores is not None:
        _vote(state, queries.none(), evictor.score_segment(segment, queries, state.seen))
    else:  # the model has not repeated the prompt yet
        evictor.waiting = queries.none()


def _vote(state: LayerState, queries: Queries, scores: Tensor) -> None:
    """Evict by these scores: at once, or when the layers that decide together have scored."""
    evictor = state.score_evictor
    evictor.waiting = queries
    if evictor.waits and state.coordinator is not None:
        for decision in state.coordinator.vote(state, scores):
            evict(decision.layer, decision.scores, decision.counts)
    else:
        evict(state, scores)


def _store(
    state: LayerState, segment: Segment, queries: Queries, new: KV | None, prompt: bool
) -> None:
    """Add new tokens, drop the oldest where the recipe evicts by age, and pack what is due.

    new: keys and values that are not stored yet (None: all are stored). prompt: whether nothing
    was packed or dropped before; the tokens are then packed as a prompt. Outliers are chosen from
    the exact tokens of the first prompt.
    """
    outliers, exact = state.outliers, new
    choosing = outliers is not None and not outliers.done
    if choosing and new is None and len(segment):
        exact = all_exact(segment, state.sinks)
    if new is not None:
        new = _without_sinks(state, queries, new)
    drop = 0
    if state.evictor is not None and not state.evictor.done:
        drop = state.evictor.surplus(len(segment) + (0 if new is None else new[0].shape[2]))
    if new is not None and new[0].shape[2]:
        segment.extend(*new, drop, queries.visible)
    elif new is None:
        if drop:
            segment.drop_front(drop)
        segment.pack(queries.visible, prompt)
        if prompt:
            segment.trim()
    if outliers is not None and choosing and exact is not None:
        outliers.done = True
        if exact[0].shape[2] == state.seen:
            outliers.choose(*exact, queries, segment, state.sinks)


def _add_to_draft(state: LayerState, queries: Queries, new: KV | None) -> None:
    """Store a step's tokens exactly; keep its queries if a part will score with them."""
    if new is not None:
        state.segment.append(*_without_sinks(state, queries, new))
    before, evictor = state.draft, state.evictor
    tokens = queries.tokens + (0 if before is None else before.tokens)
    needed = (
        (evictor is not None and evictor.scores_more)
        or (state.outliers is not None and not state.outliers.done)
        or (state.retriever is not None and state.retriever.learns)
    )
    if not needed:
        queries = queries.none()
    elif before is not None:
        queries = queries.after(before.queries)
    state.draft = Draft(tokens, queries)


def _without_sinks(state: LayerState, queries: Queries, new: KV) -> KV:
    """Copy the sinks among new keys and values; return the other keys and values."""
    if state.sinks is None:
        return new
    k, v = new
    skip = state.sinks.extend(k, v, state.seen - k.shape[2], queries.visible)
    return k[:, :, skip:], v[:, :, skip:]
