"""After attention: score → evict → pack → index.

Decides what happens to the tokens of a step, and in which order. A draft leaves this to `crop`.
Layers that decide together score one by one, and evict when the last of them has scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import CacheMisuse
from ..kernels.attend.regions import Region
from .block_evictor import BlockEvictor
from .evictor import AgeEvictor, Phase
from .joint import decide
from .latents import query_keys
from .layer_state import LayerState
from .reading import exact_tokens
from .score_evictor import Decision, StepEvictor
from .segment import Segment
from .slot_storage import SlotStorage
from .step import Queries, Uncommitted

KV = tuple[Tensor, Tensor]
"""New keys and values [B, Hk, T, D] that are not stored yet."""


def end_step(
    state: LayerState, queries: Queries, new: KV | None, regions: Sequence[Region]
) -> None:
    """Finish a step: store its tokens, and commit them if no crop and no `compress_after` waits.

    A first prompt that a layer scores by itself is scored before it is stored.

    queries: of the step. new: its keys and values [B, Hk, T, D] if they are not stored yet (None:
    they were stored before attention). regions: those that the step attended to.
    """
    evictor = state.evictor
    exact = state.seen <= state.recipe.compress_after  # the whole context stays exact
    if evictor is not None and evictor.phase is not Phase.EVICTING:
        if evictor.phase is Phase.EMPTY:
            if not exact:
                evictor.begin(state.seen)
        elif evictor.phase is not Phase.DONE:
            raise CacheMisuse(
                f"{state.name}: the prompt waits for the scores of its repetition; run the layer "
                "by its model, which repeats the prompt"
            )
    if state.like is None:
        assert new is not None
        state.like = new[0].new_empty(*new[0].shape[:2], 0, new[0].shape[3])
    if state.retriever is not None:
        state.retriever.visible = queries.visible
    if state.recording or exact:
        _add_uncommitted(state, queries, new)
    elif isinstance(state.storage, SlotStorage):
        assert isinstance(evictor, StepEvictor)
        _evict_or_wait(state, queries, evictor.score_slots(state.storage, queries, regions[0]))
    elif state.uncommitted is not None:  # no crop followed the draft, so all of its tokens stay
        _add_uncommitted(state, queries, new)
        commit(state, state.uncommitted.queries, None)
    else:
        commit(state, queries, new)


def commit(state: LayerState, queries: Queries, new: KV | None) -> None:
    """Score, evict, pack and index the tokens of a step, or of a draft that has ended.

    queries: of the step, or of all steps of the draft. new: the keys and values of the step that
    are not stored yet (None: all are stored).
    """
    state.uncommitted = None
    prompt, state.prompt_done = not state.prompt_done, True
    segment, evictor, retriever = state.storage, state.evictor, state.retriever
    assert isinstance(segment, Segment), "a layer with slots commits elsewhere"
    segment.find_start(queries.visible)
    if retriever is not None and retriever.learns and queries.tokens:
        retriever.learn(queries, query_keys(queries.q, *(new or exact_tokens(state))))
    if isinstance(evictor, BlockEvictor):
        _commit_block(state, evictor, segment, queries, new)
        return
    by_score = evictor is not None and evictor.scoring and (queries.tokens or state.repetition)
    all_exact = new is None or state.seen == new[0].shape[2]  # no earlier token is packed
    if by_score and all_exact:
        if prompt:
            state.score_evictor.note_protected(queries, state.seen)
        _commit_scored(state, segment, queries, new)
        return
    _store(state, segment, queries, new, prompt)
    if retriever is not None:
        index_due(state)


def end_repetition(state: LayerState) -> None:
    """Evict by the scores of a repeated prompt; a draft leaves this to `crop`.

    A prompt that was not repeated is within the budget: its tokens have equal scores and all stay.
    """
    if state.repetition is None:
        return
    state.repetition.end(state.segment)
    evictor = state.score_evictor
    if evictor.phase is Phase.REPEATING:
        queries = evictor.end_wait()
        _evict_or_wait(state, queries, evictor.score_segment(state.segment, queries, state.seen))


def evict(state: LayerState, queries: Queries, decision: Decision) -> None:
    """Evict by a decision for the step of these queries; then pack and index."""
    evictor, storage = state.score_evictor, state.storage
    if isinstance(storage, SlotStorage):
        assert isinstance(evictor, StepEvictor)
        evictor.evict_from_slots(storage, decision.scores, queries.visible, state.trace)
        return
    if isinstance(evictor, BlockEvictor):
        evictor.evict_block(storage, decision, queries, state.trace)
        return
    evictor.evict_from_segment(storage, decision, queries, state.trace)
    state.storage = evictor.next_storage(storage, queries.visible, state.recording)
    if state.storage is storage:
        once = evictor.phase is Phase.DONE
        storage.pack(queries.visible, prompt=once)
        if once:
            storage.trim()
        index_due(state)


def index_due(state: LayerState) -> None:
    """Index the tokens that are due, and offload them where the recipe has a tier."""
    retriever = state.retriever
    if retriever is None:
        return
    assert state.like is not None
    retriever.grow(state.segment, state.without_sinks(retriever.visible), state.like)


def _commit_scored(state: LayerState, segment: Segment, queries: Queries, new: KV | None) -> None:
    """Score a segment and evict from it.

    new: keys and values of a prompt that is not stored yet (None: all tokens are stored).
    """
    evictor = state.score_evictor
    if new is not None and not evictor.defers:  # store only the tokens that stay
        kept = evictor.keep_prompt(segment, queries, *new, state.trace)
        segment.extend(*kept, 0, queries.visible, prompt=True)
        state.storage = evictor.next_storage(segment, queries.visible, drafting=False)
        index_due(state)
        return
    if new is not None:
        segment.append(*new)
    if evictor.repetition is not None and evictor.repetition.scores is None:
        evictor.wait(Phase.REPEATING, evictor.needed(queries))
        return
    scores = evictor.score_segment(segment, queries, state.seen)
    _evict_or_wait(state, evictor.needed(queries), scores)


def _commit_block(
    state: LayerState, evictor: BlockEvictor, segment: Segment, queries: Queries, new: KV | None
) -> None:
    """Store a step's tokens exactly; then score and evict from a block that is due.

    new: keys and values that are not stored yet (None: all are stored).
    """
    if new is not None:
        segment.append(*_without_sinks(state, queries, new))
    block = evictor.due(segment)
    if block is None:
        evictor.hold(queries)
        return
    queries = evictor.take_queries(queries, len(segment) - block.used)
    scores = evictor.score_block(segment, queries, block)
    _evict_or_wait(state, evictor.needed(queries), scores)


def _evict_or_wait(state: LayerState, queries: Queries, scores: Tensor) -> None:
    """Evict by these scores: at once, or when the layers that decide together have scored.

    queries: what an eviction needs of those that have scored.
    """
    evictor = state.score_evictor
    scores = evictor.marked(scores)
    if not evictor.waits_for_layers:
        evict(state, queries, Decision(scores))
        return
    evictor.wait(Phase.DECIDING, queries, scores)
    layers = state.together or [state]
    if state is layers[-1]:
        decisions = decide([layer.score_evictor for layer in layers])
        for layer, decision in zip(layers, decisions, strict=True):
            evict(layer, layer.score_evictor.end_wait(), decision)


def _store(
    state: LayerState, segment: Segment, queries: Queries, new: KV | None, prompt: bool
) -> None:
    """Add new tokens, drop the oldest where the recipe evicts by age, and pack what is due.

    new: keys and values that are not stored yet (None: all are stored). prompt: whether nothing
    was packed or dropped before; the tokens are then packed as a prompt. Outliers are chosen from
    the exact tokens of the first prompt. Tokens before a window are dropped in whole blocks.
    """
    outliers = state.outliers
    to_mark = None
    if outliers is not None and not outliers.done:
        to_mark = exact_tokens(state) if new is None and len(segment) else new
    others = None if new is None else _without_sinks(state, queries, new)
    visible = state.without_sinks(queries.visible)
    if others is not None:
        if tokens := others[0].shape[2]:
            segment.extend(*others, _surplus(state, segment, tokens), visible, prompt)
    else:
        if drop := _surplus(state, segment, 0):
            segment.drop_front(drop)
        segment.pack(visible, prompt)
        if prompt:
            segment.trim()
    if expired := _expired(state, segment):
        segment.drop_front(expired)
    if outliers is not None and to_mark is not None:
        outliers.done = True
        if to_mark[0].shape[2] == state.seen:
            outliers.choose(*to_mark, queries, segment, state.sinks)


def _expired(state: LayerState, segment: Segment, prompt: bool = False) -> int:
    """Return how many tokens of a segment are before its window; prompt: see `Recipe.expired`."""
    if state.window is None:
        return 0
    return max(0, state.recipe.expired(state.seen, state.window, prompt) - segment.first)


def _surplus(state: LayerState, segment: Segment, new: int) -> int:
    """Return how many tokens of a segment are too old to stay once it has `new` more."""
    if state.window is not None:
        return _expired(state, segment, prompt=True)
    evictor = state.evictor
    return evictor.surplus(len(segment) + new) if isinstance(evictor, AgeEvictor) else 0


def _add_uncommitted(state: LayerState, queries: Queries, new: KV | None) -> None:
    """Store a step's tokens exactly; keep its queries if a part will score with them."""
    if new is not None:
        state.segment.append(*_without_sinks(state, queries, new))
    before, evictor = state.uncommitted, state.evictor
    tokens = queries.tokens + (0 if before is None else before.tokens)
    needed = (
        (evictor is not None and evictor.scoring and evictor.repetition is None)
        or state.needs_ids
        or (state.outliers is not None and not state.outliers.done)
        or (state.retriever is not None and state.retriever.learns)
    )
    if not needed:
        queries = queries.without_queries()
    elif before is not None:
        queries = queries.after(before.queries)
    state.uncommitted = Uncommitted(tokens, queries)


def _without_sinks(state: LayerState, queries: Queries, new: KV) -> KV:
    """Copy the sinks among new keys and values; return the other keys and values."""
    if state.sinks is None:
        return new
    k, v = new
    skip = state.sinks.extend(k, v, state.seen - k.shape[2], queries.visible)
    return k[:, :, skip:], v[:, :, skip:]
