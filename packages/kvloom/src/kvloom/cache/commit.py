"""After attention: score → evict → pack → index.

Decides what happens to the tokens of a step, and in which order. A draft leaves this to `crop`.
Layers that decide together score one by one, and evict when the last of them has scored.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CacheMisuse
from ..kernels.attend.regions import Region
from .block_evictor import BlockEvictor
from .evictor import Phase
from .joint import decide
from .latents import query_keys
from .layer_state import LayerState
from .reading import exact_tokens
from .score_evictor import Decision
from .segment import Segment
from .slot_storage import SlotStorage
from .step import KV, Queries, Uncommitted


def end_step(
    state: LayerState, queries: Queries, new: KV | None, regions: Sequence[Region]
) -> None:
    """Finish a step: store its tokens, and commit them if no crop and no `compress_after` waits.

    A first prompt that a layer scores by itself is scored before it is stored.

    queries: The step's queries. new: The step's keys and values [B, Hk, T, D], or None if they are
    stored already. regions: The regions that the step attended to.
    """
    evictor = state.evictor
    exact = state.seen <= state.recipe.compress_after  # nothing is packed or evicted before
    if evictor is not None and evictor.phase in (Phase.REPEATING, Phase.DECIDING):
        raise CacheMisuse(
            f"{state.name}: the prompt waits for the scores of its repetition; run the layer "
            "by its model, which repeats the prompt"
        )
    if queries.predictor is not None:
        assert new is not None
        queries = state.score_evictor.as_repeated(queries, new[0])
    if state.like is None:
        assert new is not None
        state.like = new[0].new_empty(*new[0].shape[:2], 0, new[0].shape[3])
    if state.retriever is not None:
        state.retriever.visible = queries.visible
    if state.recording or exact:
        _add_uncommitted(state, queries, new)
    elif isinstance(state.storage, SlotStorage):
        _score(state, queries, None, regions)
    elif state.uncommitted is not None:  # no crop followed the draft, so all of its tokens stay
        _add_uncommitted(state, queries, new)
        commit(state, state.uncommitted.queries, None)
    else:
        commit(state, queries, new)


def commit(state: LayerState, queries: Queries, new: KV | None) -> None:
    """Score, evict, pack and index the tokens of a step, or of a draft that has ended.

    queries: those of the step, or of all steps of the draft. new: the keys and values of the
    step that are not stored yet (None: all are stored).
    """
    state.uncommitted = None
    prompt, state.prompt_done = not state.prompt_done, True
    segment, evictor, retriever = state.segment, state.evictor, state.retriever
    if prompt and evictor is not None:
        evictor.set_budget(state.seen)
    segment.find_start(queries.visible)
    if retriever is not None and retriever.learns and queries.tokens:
        retriever.learn(queries, query_keys(queries.q, *(new or exact_tokens(state))))
    by_score = evictor is not None and evictor.scoring and (queries.tokens or state.repetition)
    blocks = evictor if isinstance(evictor, BlockEvictor) else None
    if by_score and (blocks is not None or not segment.has_packed):
        if prompt:
            state.score_evictor.note_protected(queries, state.seen)
        if new is not None and state.score_evictor.defers:
            segment.append(*_store_sinks(state, queries, new))
            new = None
        if blocks is not None:
            blocks.keep_whole(segment, queries.visible, state.trace is not None)
        _score(state, queries, new)
        return
    _store(state, segment, queries, new, prompt)
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
        scores = state.repetition.pop(len(state.segment))
        _evict_or_wait(state, Decision(evictor.end_wait(), scores))


def evict(state: LayerState, decision: Decision) -> None:
    """Evict by a decision, then pack and index."""
    evictor, trace = state.score_evictor, state.trace
    state.storage = evictor.evict(state.storage, decision, trace, state.recording)
    index_due(state)


def index_due(state: LayerState) -> None:
    """Index the tokens that are due, and offload them where the recipe has a tier."""
    retriever = state.retriever
    if retriever is None:
        return
    assert state.like is not None
    retriever.grow(state.segment, state.hide_sinks(retriever.visible), state.like)


def _score(
    state: LayerState, queries: Queries, new: KV | None, regions: Sequence[Region] = ()
) -> None:
    """Score the tokens of a layer, then evict unless the evictor waits for more.

    new: keys and values of a prompt that is stored when some of it is evicted (None: all tokens are
    stored). regions: those that the step attended to.
    """
    decision = state.score_evictor.score(state.storage, queries, new, regions)
    if decision is not None:
        _evict_or_wait(state, decision)


def _evict_or_wait(state: LayerState, decision: Decision) -> None:
    """Evict by these scores: at once, or when the layers that decide together have scored."""
    evictor = state.score_evictor
    if evictor.protected is not None:
        decision = decision._replace(scores=evictor.marked(decision.scores))
    if not evictor.waits_for_layers:
        evict(state, decision)
        return
    evictor.vote(decision)
    layers = state.joint_layers or [state]
    if state is layers[-1]:
        decisions = decide([layer.score_evictor for layer in layers])
        for layer, joint in zip(layers, decisions, strict=True):
            evict(layer, joint)


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
    to_store = None if new is None else _store_sinks(state, queries, new)
    visible = state.hide_sinks(queries.visible)
    if to_store is not None:
        if tokens := to_store[0].shape[2]:
            segment.extend(*to_store, _surplus(state, segment, tokens), visible, prompt)
    else:
        if drop := _surplus(state, segment, 0):
            segment.drop_front(drop)
        segment.pack(visible, prompt)
        if prompt:
            segment.trim()
    if state.window is not None and (expired := _expired(state, segment)):
        segment.drop_front(expired)
    if outliers is not None and to_mark is not None:
        outliers.done = True
        if to_mark[0].shape[2] == state.seen:
            outliers.choose(*to_mark, queries, segment, state.sinks)


def _expired(state: LayerState, segment: Segment, prompt: bool = False) -> int:
    """Return how many tokens of a segment are before its window; prompt: see `Recipe.expired`."""
    assert state.window is not None
    return max(0, state.recipe.expired(state.seen, state.window, prompt) - segment.first)


def _surplus(state: LayerState, segment: Segment, new: int) -> int:
    """Return how many tokens of a segment are too old to stay once it has `new` more."""
    if state.window is not None:
        return _expired(state, segment, prompt=True)
    return 0 if state.evictor is None else state.evictor.surplus(len(segment) + new)


def _add_uncommitted(state: LayerState, queries: Queries, new: KV | None) -> None:
    """Store a step's tokens exactly; keep its queries if a part will score with them."""
    if new is not None:
        state.segment.append(*_store_sinks(state, queries, new))
    before, evictor = state.uncommitted, state.evictor
    tokens = queries.tokens + (0 if before is None else before.tokens)
    needed = (
        (
            evictor is not None
            and evictor.scoring
            and (evictor.repetition is None or evictor.keep.fit is not None)
        )
        or state.needs_ids
        or (state.outliers is not None and not state.outliers.done)
        or (state.retriever is not None and state.retriever.learns)
    )
    if not needed:
        queries = queries.without_queries()
    elif before is not None:
        queries = queries.after(before.queries)
    state.uncommitted = Uncommitted(tokens, queries)


def _store_sinks(state: LayerState, queries: Queries, new: KV) -> KV:
    """Store the sinks among new keys and values; return the other keys and values."""
    if state.sinks is None:
        return new
    k, v = new
    skip = state.sinks.extend(k, v, state.seen - k.shape[2], queries.visible)
    return k[:, :, skip:], v[:, :, skip:]
