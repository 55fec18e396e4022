"""One step of a layer: append → attend → commit (score → evict → pack → index).

A step is always past + present: the T new queries attend to the stored tokens, or to those that
recall chooses, and causally to the T new keys, exactly as given; the states are merged. A short
step stores its tokens before it attends, a long one after. A prompt, a decode step, a second turn
and a chunk differ in T alone. Decides the order of this; the parts of a layer decide all else.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import CacheMisuse
from .attention import attend_to, joined
from .checks import check_range, checked, out_of_range
from .commit import commit
from .layer_state import LayerState
from .reading import step_regions
from .score_evictor import StepEvictor
from .slot_storage import SlotStorage
from .step import Queries, StepInputs

# Up to this many new tokens are appended to the tail before attention, so that tail and present
# are contiguous. More would make the tail of a packed store large for a moment.
_SHORT = 64


def attend(state: LayerState, inputs: StepInputs) -> Tensor:
    """Run one step of a layer; returns [B, Hq, T, D] in the dtype of the queries.

    Raises `CacheMisuse` or `NotFinite`; the caller then undoes the step.
    """
    step = checked(state, inputs)
    stored = _append(state, step)
    regions = step_regions(state, step, stored)
    queries, evictor = step.queries, state.evictor
    scores_step = evictor is not None and evictor.scores_steps and not state.recording
    read = regions[0].tokens if len(regions) == 1 else sum(x.tokens for x in regions)
    out, products = attend_to(
        queries.q, regions, queries.scale, queries.softcap, scores_step and state.seen > 0,
        state.plan,
    )  # fmt: skip
    state.seen += step.k.shape[2]
    state.read = read
    if products is not None or queries.q.requires_grad:
        q, scale, visible, softcap, alibi, ids, _ = queries
        q = q.detach() if q.requires_grad else q
        queries = Queries(q, scale, visible, softcap, alibi, ids, products)
    commit(state, queries, None if stored else (step.k.detach(), step.v.detach()), regions)
    return out


def prefill(state: LayerState, inputs: StepInputs) -> None:
    """Store a first prompt as `attend` does, without its attention.

    inputs.queries: T or fewer, the last ones, for recipes that score the prompt.
    """
    if state.seen:
        raise CacheMisuse(f"{state.name}: prefill is for the first prompt; use attend")
    step = checked(state, inputs)
    check_range(state.name, state.max_abs, step.k, step.v)
    state.seen = state.read = step.tokens
    queries = step.queries._replace(q=step.queries.q.detach())
    commit(state, queries, (step.k.detach(), step.v.detach()), [])


def repeat(state: LayerState, inputs: StepInputs, repeated: tuple[int, int]) -> Tensor:
    """Attend as `attend` does, but store nothing: the step ends with a repetition of the prompt.

    repeated: (first, end) of the prompt's tokens that are repeated. An evictor that scores by
    repetition scores these.
    """
    step = checked(state, inputs)
    regions = joined(step_regions(state, step, stored=False))
    out, _ = attend_to(step.queries.q, regions, step.queries.scale, step.queries.softcap)
    if state.scores_repetition:
        state.prompt_evictor.note_repetition(state.segment, step, repeated)
    return out


def _append(state: LayerState, step: StepInputs) -> bool:
    """Store a short step's tokens before attention, which then reads all tokens in one region.

    Returns whether they were stored. Attention reads a long step's tokens as they are given.
    Raises `NotFinite`.
    """
    _, k, v = step
    t, storage = k.shape[2], state.storage
    if isinstance(storage, SlotStorage) and (t > 1 or state.recording):
        assert isinstance(state.evictor, StepEvictor)
        storage = state.storage = state.evictor.in_segment(storage)
    fits = t <= _SHORT or state.exact_until_commit
    if not state.seen or not fits or not (state.sinks is None or state.sinks.full(state.seen)):
        check_range(state.name, state.max_abs, k, v)
        return False
    max_abs = None if k.is_cuda and t == 1 else state.max_abs  # see check_range
    if k.requires_grad or v.requires_grad:
        k, v = k.detach(), v.detach()
    if not storage.append(k, v, max_abs):
        raise out_of_range(state.name, state.max_abs, k, v)
    return True
