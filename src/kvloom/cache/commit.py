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
from .slots import Slots
from .step import Queries

KV = tuple[Tensor, Tensor]
"""New keys and values [B, Hk, T, D] that are not stored yet."""


def commit(
    layer: LayerState, queries: Queries, new: KV | None, parts: Sequence[Part | RaggedPart]
) -> None:
    """Store a step's tokens, then score, evict, pack and index what is due.

    queries: of the step. new: its keys and values [B, Hk, T, D] if they are not stored yet (None:
    they were stored before attention). parts: the tokens that the step attended to.
    """
    evictor = layer.evictor
    if evictor is not None and evictor.waiting is not None:
        raise CacheMisuse(
            f"{layer.name}: the prompt waits for the scores of its repetition; run the layer by "
            "its model, which repeats the prompt"
        )
    if layer.like is None:
        assert new is not None
        layer.like = new[0].new_empty(*new[0].shape[:2], 0, new[0].shape[3])
    exact = layer.seen <= layer.recipe.start  # the whole context stays exact
    if evictor is not None and not evictor.begun and not exact:
        evictor.begin(layer.seen)
    if layer.retriever is not None:
        layer.retriever.visible = queries.visible
    if layer.recording or exact:
        _add_to_draft(layer, queries, new)
    elif isinstance(layer.tokens, Slots):
        slots = parts[0]
        assert isinstance(slots, Part)
        scores = layer.score_evictor.score_slots(layer.tokens, queries, slots, layer.seen)
        _vote(layer, queries, scores)
    elif layer.draft is not None:  # no crop followed the draft, so all of its tokens stay
        _add_to_draft(layer, queries, new)
        settle(layer, layer.draft.queries, None)
    else:
        settle(layer, queries, new)


def settle(layer: LayerState, queries: Queries, new: KV | None) -> None:
    """Score, evict, pack and index the tokens of a step, or of a draft that has ended.

    queries: of the step, or of all steps of the draft. new: the keys and values of the step that
    are not stored yet (None: all are stored).
    """
    layer.draft = None
    first, layer.settled = not layer.settled, True
    segment, evictor, retriever = layer.tokens, layer.evictor, layer.retriever
    assert isinstance(segment, Segment), "slots are settled at once"
    if retriever is not None and retriever.learns and queries.tokens:
        retriever.learn(queries, (new or all_exact(segment, layer.sinks))[0])
    scores = evictor is not None and not evictor.done and evictor.decides(queries)
    if scores and (new is None or layer.seen == new[0].shape[2]):
        _settle_scored(layer, segment, queries, new)
        return
    _store(layer, segment, queries, new, prompt=first)
    if retriever is not None:
        index(layer)


def end_repetition(layer: LayerState) -> None:
    """Evict by the scores of a repeated prompt; a draft leaves this to `crop`.

    A prompt that was not repeated has equal scores: nothing of it is evicted.
    """
    if not layer.scores_repetition:
        return
    evictor = layer.score_evictor
    evictor.end_repetition(layer.segment)
    if evictor.waiting is not None:
        scores = evictor.score_segment(layer.segment, evictor.waiting, layer.seen)
        _vote(layer, evictor.waiting, scores)


def evict(layer: LayerState, scores: Tensor, counts: Tensor | None = None) -> None:
    """Evict by fp32 scores [B, Hk, N] of the queries that wait; then pack and index.

    counts: int64 [B, Hk], how many tokens each head wins where heads of all layers compete for
    them (None: the scores of this layer decide alone).
    """
    evictor, tokens = layer.score_evictor, layer.tokens
    queries, evictor.waiting = evictor.waiting, None
    assert queries is not None
    if isinstance(tokens, Slots):
        evictor.evict_from_slots(tokens, scores, queries.visible, layer.seen, layer.trace)
        return
    evictor.evict_from_segment(tokens, scores, queries, layer.trace, counts)
    layer.tokens = evictor.settled(tokens, layer.recording)
    if isinstance(layer.tokens, Segment):
        layer.tokens.pack(queries.visible, prompt=evictor.done)
        if evictor.done:
            layer.tokens.trim()
        index(layer)


def index(layer: LayerState) -> None:
    """Index the tokens that are due, and offload them where the recipe has a tier."""
    retriever = layer.retriever
    if retriever is None:
        return
    assert layer.like is not None
    visible = retriever.visible
    if visible is not None and layer.sinks is not None:
        visible = layer.sinks.hide(visible)
    retriever.grow(layer.segment, visible, layer.like)


def _settle_scored(layer: LayerState, segment: Segment, queries: Queries, new: KV | None) -> None:
    """Score a segment and evict from it.

    new: keys and values of a prompt that is not stored yet (None: all tokens are stored).
    """
    evictor = layer.score_evictor
    if new is not None and not evictor.decides_later:  # store only the tokens that stay
        kept = evictor.keep_prompt(segment, queries, *new, layer.trace)
        segment.extend(*kept, 0, queries.visible)
        layer.tokens = evictor.settled(segment, drafting=False)
        index(layer)
        return
    if new is not None:
        segment.append(*new)
    if evictor.repetition is None:
        _vote(layer, queries, evictor.score_segment(segment, queries, layer.seen))
    elif evictor.repetition.scores is not None:
        _vote(layer, queries.none(), evictor.score_segment(segment, queries, layer.seen))
    else:  # the model has not repeated the prompt yet
        evictor.waiting = queries.none()


def _vote(layer: LayerState, queries: Queries, scores: Tensor) -> None:
    """Evict by these scores: at once, or when the layers that decide together have scored."""
    evictor = layer.score_evictor
    evictor.waiting = queries
    if evictor.waits and layer.coordinator is not None:
        for decision in layer.coordinator.vote(layer, scores):
            evict(decision.layer, decision.scores, decision.counts)
    else:
        evict(layer, scores)


def _store(
    layer: LayerState, segment: Segment, queries: Queries, new: KV | None, prompt: bool
) -> None:
    """Add new tokens, drop the oldest where the recipe evicts by age, and pack what is due.

    new: keys and values that are not stored yet (None: all are stored). prompt: whether nothing
    was packed or dropped before; the tokens are then packed as a prompt. Outliers are chosen from
    the exact tokens of the first prompt.
    """
    outliers, exact = layer.outliers, new
    choosing = outliers is not None and not outliers.done
    if choosing and new is None and len(segment):
        exact = all_exact(segment, layer.sinks)
    if new is not None:
        new = _without_sinks(layer, queries, new)
    drop = 0
    if layer.evictor is not None and not layer.evictor.done:
        drop = layer.evictor.surplus(len(segment) + (0 if new is None else new[0].shape[2]))
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
        if exact[0].shape[2] == layer.seen:
            outliers.choose(*exact, queries, segment, layer.sinks)


def _add_to_draft(layer: LayerState, queries: Queries, new: KV | None) -> None:
    """Store a step's tokens exactly; keep its queries if a part will score with them."""
    if new is not None:
        layer.segment.append(*_without_sinks(layer, queries, new))
    before, evictor = layer.draft, layer.evictor
    tokens = queries.tokens + (0 if before is None else before.tokens)
    needed = (
        (evictor is not None and evictor.scores_more)
        or (layer.outliers is not None and not layer.outliers.done)
        or (layer.retriever is not None and layer.retriever.learns)
    )
    if not needed:
        queries = queries.none()
    elif before is not None:
        queries = queries.after(before.queries)
    layer.draft = Draft(tokens, queries)


def _without_sinks(layer: LayerState, queries: Queries, new: KV) -> KV:
    """Copy the sinks among new keys and values; return the other keys and values."""
    if layer.sinks is None:
        return new
    k, v = new
    skip = layer.sinks.extend(k, v, layer.seen - k.shape[2], queries.visible)
    return k[:, :, skip:], v[:, :, skip:]
