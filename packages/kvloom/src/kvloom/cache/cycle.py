"""One step of a layer: append → attend → commit (score → evict → pack → index).

A step is always past + present: the T new queries attend to the stored tokens, or to those that
recall chooses, and causally to the T new keys, exactly as given; the states are merged. A short
step stores its tokens before it attends, a long one after. A prompt, a decode step, a second turn
and a chunk differ in T alone. Decides the order of this; the parts of a layer decide all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..errors import CacheMisuse
from ..kernels.attend.reference import AttentionState
from ..kernels.attend.regions import Region
from ..kernels.plan import OpPlan
from . import latents
from .attention import attend_to, one_region
from .checks import check_ids, check_range, checked_step, out_of_range
from .commit import end_step
from .layer_state import LayerState
from .reading import attention_to_later, step_regions, waiting_regions
from .step import Queries, StepInputs
from .waiting import WaitingTokens

# Up to this many new tokens are appended to the tail before attention, so that tail and present
# are contiguous. More would make the tail of a packed store large for a moment.
_SHORT = 64


class OpenStep(NamedTuple):
    """A step that has attended, and whose tokens no part of the layer counts yet.

    stored: whether its keys and values are stored. regions: those that its queries attended to.
    """

    step: StepInputs
    stored: bool
    regions: list[Region]


def run_step(state: LayerState, inputs: StepInputs) -> Tensor:
    """Run one step of a layer; returns [B, Hq, T, D] in the dtype of the queries.

    Raises `CacheMisuse` or `NotFinite`; the caller then undoes the step.
    """
    out, open_step = begin(state, inputs)
    finish(state, open_step)
    return out


def begin(state: LayerState, inputs: StepInputs) -> tuple[Tensor, OpenStep]:
    """Attend as `run_step` does; `finish` must follow."""
    check_ids(state, inputs.queries.ids)
    step = checked_step(state, inputs)
    stored = _append(state, step)
    if step.attended is not None:
        state.tokens_read = step.tokens
        return step.attended, OpenStep(step, stored, [])
    assert state.window is None or step.tokens == 1, "the model attends to more tokens of a window"
    regions = step_regions(state, step, stored)
    queries, evictor = step.queries, state.evictor
    scores_step = evictor is not None and evictor.scores_steps and not state.recording
    products_score = scores_step and state.seen > 0 and queries.later_seen is None
    state.tokens_read = regions[0].tokens if len(regions) == 1 else sum(x.tokens for x in regions)
    to_later = None if queries.later_seen is None else attention_to_later(state, step)
    out, products, lse = _attend(state, step, regions, to_later, state.plan, products_score)
    if products is not None or lse is not None or queries.q.requires_grad:
        q = queries.q.detach() if queries.q.requires_grad else queries.q
        queries = queries._replace(q=q, products=products, lse=lse)
        step = step._replace(queries=queries)
    return out, OpenStep(step, stored, regions)


def read(state: LayerState, inputs: StepInputs, stored: bool) -> Tensor:
    """Attend by the queries of another layer that shares this layer's tokens, in an open step.

    inputs: the keys and values of the open step; queries: as many, or the newest of them.
    """
    step = checked_step(state, inputs)
    if step.attended is not None:
        return step.attended
    regions = step_regions(state, step, stored)
    to_later = None if step.queries.later_seen is None else attention_to_later(state, step)
    return _attend(state, step, regions, to_later)[0]


def finish(state: LayerState, open_step: OpenStep) -> None:
    """Count the tokens of an open step, then score, evict, pack and index what is due."""
    (queries, k, v, *_), stored, regions = open_step
    state.seen += k.shape[2]
    end_step(state, queries, None if stored else (k.detach(), v.detach()), regions)


def attend_waiting(state: LayerState, inputs: StepInputs, waiting: WaitingTokens) -> Tensor:
    """Attend by the queries of one token, which waits; the layer counts it in `commit_waiting`.

    The same calls, with the same tensors, follow for every token that waits, so that a recorded
    step can be replayed.
    """
    step = checked_step(state, inputs)
    if waiting.visible is not None:
        step = step._replace(queries=step.queries._replace(visible=waiting.visible))
    for slots, x in zip(waiting.slots_of(state.segment), (step.k, step.v), strict=True):
        slots.index_copy_(2, waiting.slot, x)
    regions = waiting_regions(state, step.queries, waiting)
    state.tokens_read = sum(x.tokens for x in regions) - waiting.room + 1
    return _attend(state, step, regions)[0]


def commit_waiting(state: LayerState, waiting: WaitingTokens, tokens: int) -> None:
    """Count the first `tokens` tokens that wait; then pack what is due."""
    assert state.like is not None
    for side in (state.segment.keys, state.segment.values):
        side.tail.count += tokens
    state.seen += tokens
    state.tokens_read += tokens - 1
    end_step(state, Queries(state.like, 1.0, waiting.visible_after(tokens)), None, [])


def prefill(state: LayerState, inputs: StepInputs) -> None:
    """Store a first prompt as `run_step` does, without its attention.

    inputs.queries: T or fewer, the last ones, for recipes that score the prompt.
    """
    if state.seen:
        raise CacheMisuse(f"{state.name}: prefill is for the first prompt; use attend")
    check_ids(state, inputs.queries.ids)
    step = checked_step(state, inputs)
    check_range(state.name, state.recipe.store, state.max_abs, step.k, step.v)
    state.seen = state.tokens_read = step.tokens
    queries = step.queries._replace(q=step.queries.q.detach())
    end_step(state, queries, (step.k.detach(), step.v.detach()), [])


def repeat(state: LayerState, inputs: StepInputs, repeated: tuple[int, int] | None) -> Tensor:
    """Attend as `run_step` does, but store nothing: the step ends with a repetition of the prompt.

    repeated: (first, end) of the prompt's tokens that are repeated. An evictor that scores by
    repetition scores these; None: the queries are of another layer, and no score sees them.
    """
    step = checked_step(state, inputs)
    if step.attended is not None:
        return step.attended
    regions: Sequence[Region] = step_regions(state, step, stored=False)
    if not state.facts.latent:
        regions = one_region(regions)
    out, *_ = _attend(state, step, regions)
    if state.repetition is not None and repeated is not None:
        state.repetition.note(state.segment, step, repeated)
    return out


def _attend(
    state: LayerState,
    step: StepInputs,
    regions: Sequence[Region],
    to_later: AttentionState | None = None,
    plan: OpPlan[..., AttentionState] | None = None,
    products: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend a step's queries to regions; the arguments and the result are those of `attend_to`.

    The queries of a latent layer are absorbed ones; their output is expanded to that of the heads.
    """
    queries = step.queries
    if not state.facts.latent:
        return attend_to(
            queries.q, regions, queries.scale, queries.softcap, products, plan,
            queries.sink_logits, to_later,
        )  # fmt: skip
    q, regions = latents.absorbed(queries.q, regions, queries.scale)
    plan = plan if q.shape[2] == 1 else None
    out, *_ = attend_to(q, regions, queries.scale, None, plan=plan, to_later=to_later)
    return out if step.expand is None else step.expand(out), None, None


def _append(state: LayerState, step: StepInputs) -> bool:
    """Store a short step's tokens before attention, which then reads all tokens in one region.

    Returns whether they were stored. Attention reads a long step's tokens as they are given.
    Raises `NotFinite`.
    """
    k, v = step.k, step.v
    t, storage = k.shape[2], state.storage
    if state.evictor is not None and (t > 1 or state.recording):
        storage = state.storage = state.evictor.in_segment(storage)
    fits = t <= _SHORT or state.exact_until_commit
    if not state.seen or not fits or not (state.sinks is None or state.sinks.full(state.seen)):
        check_range(state.name, state.recipe.store, state.max_abs, k, v)
        return False
    max_abs = None if k.is_cuda and t == 1 else state.max_abs  # see check_range
    if k.requires_grad or v.requires_grad:
        k, v = k.detach(), v.detach()
    if not storage.append(k, v, max_abs):
        raise out_of_range(state.name, state.recipe.store, state.max_abs, k, v)
    return True
