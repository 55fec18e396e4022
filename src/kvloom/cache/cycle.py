"""One step of a layer: append → attend → commit (score → evict → pack → index).

A step is always past + present: the T new queries attend to the stored tokens, or to those that
recall chooses, and causally to the T new keys, exactly as given; the states are merged. A short
step stores its tokens before it attends, a long one after. A prompt, a decode step, a second turn
and a chunk differ in T alone. Decides the order of this; the parts of a layer decide all else.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import CacheMisuse
from .checks import check_range, checked, out_of_range
from .commit import commit
from .layer_state import LayerState
from .part import attend_parts, joined
from .reading import step_parts
from .slots import Slots
from .step import StepInputs

# Up to this many new tokens are appended to the tail before attention, so that tail and present
# are contiguous. More would make the tail of a packed store large for a moment.
_SHORT = 64


def attend(layer: LayerState, given: StepInputs) -> Tensor:
    """Run one step of a layer; returns [B, Hq, T, D] in the dtype of the queries.

    Raises `CacheMisuse` or `NotFinite`; the caller then undoes the step.
    """
    step = checked(layer, given)
    stored = _append(layer, step)
    parts = step_parts(layer, step, stored)
    queries, evictor = step.queries, layer.evictor
    scores_step = evictor is not None and evictor.scores_steps and not layer.recording
    read = parts[0].tokens if len(parts) == 1 else sum(part.tokens for part in parts)
    out, products = attend_parts(
        queries.q, parts, queries.scale, queries.softcap, scores_step and layer.seen > 0,
        layer.plans, read,
    )  # fmt: skip
    layer.seen += step.k.shape[2]
    layer.read = read
    if products is not None or queries.q.requires_grad:
        queries = queries._replace(q=queries.q.detach(), products=products)
    commit(layer, queries, None if stored else (step.k.detach(), step.v.detach()), parts)
    return out


def prefill(layer: LayerState, given: StepInputs) -> None:
    """Store a first prompt as `attend` does, without its attention.

    given.queries: T or fewer, the last ones, for recipes that score the prompt.
    """
    if layer.seen:
        raise CacheMisuse(f"{layer.name}: prefill is for the first prompt; use attend")
    step = checked(layer, given)
    check_range(layer.name, layer.max_abs, step.k, step.v)
    layer.seen = layer.read = step.tokens
    queries = step.queries._replace(q=step.queries.q.detach())
    commit(layer, queries, (step.k.detach(), step.v.detach()), [])


def repeat(layer: LayerState, given: StepInputs, repeated: tuple[int, int]) -> Tensor:
    """Attend as `attend` does, but store nothing: the step ends with a repetition of the prompt.

    repeated: (first, end) of the prompt's tokens that are repeated. An evictor that scores by
    repetition scores these.
    """
    step = checked(layer, given)
    parts = joined(step_parts(layer, step, stored=False))
    out, _ = attend_parts(step.queries.q, parts, step.queries.scale, step.queries.softcap)
    if layer.scores_repetition:
        layer.score_evictor.note_repetition(layer.segment, step, repeated)
    return out


def _append(layer: LayerState, step: StepInputs) -> bool:
    """Store a short step's tokens before attention, which then reads all tokens in one part.

    Returns whether they were stored. Attention reads a long step's tokens as they are given.
    Raises `NotFinite`.
    """
    _, k, v = step
    t, tokens = k.shape[2], layer.tokens
    if isinstance(tokens, Slots) and (t > 1 or layer.recording):
        tokens = layer.tokens = layer.score_evictor.in_segment(tokens, layer.seen)
    fits = t <= _SHORT or layer.all_exact
    if not layer.seen or not fits or not (layer.sinks is None or layer.sinks.full(layer.seen)):
        check_range(layer.name, layer.max_abs, k, v)
        return False
    max_abs = None if k.is_cuda and t == 1 else layer.max_abs  # see check_range
    if k.requires_grad or v.requires_grad:
        k, v = k.detach(), v.detach()
    if isinstance(tokens, Slots):
        appended = tokens.append(k, v, layer.seen, max_abs)
    else:
        appended = tokens.append(k, v, max_abs)
    if not appended:
        raise out_of_range(layer.name, layer.max_abs, k, v)
    return True
