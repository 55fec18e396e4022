"""Which regions a step attends to, and which tokens a layer stores.

Decides the order of the regions: sinks, outliers, the other tokens (all or those recalled), the
step's own tokens where they are not stored yet, and those of which heads have different numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CacheMisuse
from ..kernels.attend.reference import AttentionState, attend_exact
from ..kernels.attend.regions import KVView, Region
from ..kernels.select.reference import gather
from .latents import query_keys
from .layer_state import LayerState
from .segment import Segment
from .slot_storage import SlotStorage
from .step import Queries, StepInputs
from .waiting import WaitingTokens


def step_regions(state: LayerState, step: StepInputs, stored: bool) -> list[Region]:
    """Return the regions that a step attends to: stored or recalled tokens, and its own.

    stored: whether the layer has stored the step's own tokens already.
    """
    queries, k, v, *_ = step
    t, past = k.shape[2], state.seen
    regions: list[Region] = []
    if past:
        regions += _past_regions(state, queries, t if stored else 0)
    if not stored:
        visible, bias = _own_masks(queries, past, t)
        regions.append(Region.exact(k, v, visible=visible, bias=bias, step_tokens=t))
    return regions + _ragged_regions(state, queries)


def waiting_regions(state: LayerState, queries: Queries, waiting: WaitingTokens) -> list[Region]:
    """Return the regions of a step whose token waits, and is in its slot already."""
    assert queries.alibi is None, "the tokens that wait have no bias"
    keys, values = waiting.slots_of(state.segment)
    own = Region.exact(keys, values, visible=waiting.sees)
    return [*_past_regions(state, queries, 0), own, *_ragged_regions(state, queries)]


def _ragged_regions(state: LayerState, queries: Queries) -> list[Region]:
    """Return the tokens of which heads have different numbers."""
    if state.ragged is None:
        return []
    return state.ragged.regions(state.hide_sinks(queries.visible))


def attention_to_later(state: LayerState, step: StepInputs) -> AttentionState:
    """Attend to the later tokens of a step that its queries see.

    No kernel and no region knows such tokens, so this is merged with the attention to the others.
    """
    queries, k, v, *_ = step
    visible, bias = _own_masks(queries, state.seen, step.tokens)
    keys = query_keys(queries.q, k, v)
    return attend_exact(
        queries.q, keys, v, queries.scale, visible=visible, softcap=queries.softcap, bias=bias,
        later_seen=queries.later_seen,
    )  # fmt: skip


def _own_masks(queries: Queries, past: int, tokens: int) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask bool [B, 1, T] and the bias fp32 [B or 1, Hq, T] of a step's own tokens."""
    bias = None
    if queries.alibi is not None:
        index = torch.arange(past, past + tokens, device=queries.q.device)
        bias = queries.alibi.bias(index.expand(1, 1, -1))
    return None if queries.visible is None else queries.visible[:, :, past:], bias


def _past_regions(state: LayerState, queries: Queries, step_tokens: int) -> list[Region]:
    """Return the stored tokens that a step reads; the last `step_tokens` of them are its own."""
    visible, alibi, storage, regions = queries.visible, queries.alibi, state.storage, []
    evictor, seen = state.evictor, state.seen
    if state.sinks is not None:
        sinks = state.sinks.region(seen, visible, alibi, storage.first)
        if state.rope is not None:
            shift = state.sinks.behind(storage.first)
            keys = state.rope.rotate(sinks.keys.tail, shift)
            sinks = sinks._replace(keys=KVView(None, keys))
        regions.append(sinks)
        visible = state.sinks.hide(visible)
    if state.outliers is not None:  # in a padded row, sinks may be among them
        regions += state.outliers.regions(visible, alibi)
        visible = state.outliers.hide(visible, seen + step_tokens)
    if regions and not len(storage):
        return regions
    if state.retriever is not None:
        read = state.retriever.read(
            state.segment, queries, visible, alibi, step_tokens, state.trace
        )
        return [*regions, *read]
    if state.window is not None and isinstance(storage, Segment):
        begin = max(0, len(storage) - step_tokens - (state.window - 1))
        return [storage.region(visible, step_tokens, alibi, begin)]
    regions.append(storage.region(visible, step_tokens, alibi))
    if evictor is None:
        return regions
    return evictor.renumbered(regions, storage, seen + step_tokens - 1)


def exact_tokens(state: LayerState) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, Hk, N, D] of all tokens seen, none of which is packed yet."""
    segment, sinks = state.segment, state.sinks
    k, v = segment.exact()
    if sinks is None or sinks.keys is None or sinks.values is None or sinks.start is None:
        return k, v
    slot = torch.arange(segment.first, device=k.device) - sinks.start[:, None]
    slots = slot.clamp_min(0)[:, None].expand(-1, k.shape[1], -1)
    first_k, first_v = gather(sinks.keys, slots), gather(sinks.values, slots)
    return torch.cat([first_k, k], dim=2), torch.cat([first_v, v], dim=2)


def index_mask(index: Tensor, tokens: int) -> Tensor:
    """Return the tokens that indices int64 [..., N] name, bool [..., tokens]; -1: no token."""
    mask = torch.zeros(*index.shape[:-1], tokens + 1, dtype=torch.bool, device=index.device)
    return mask.scatter_(-1, index.masked_fill(index < 0, tokens), True)[..., :tokens]


def logical(state: LayerState) -> Tensor:
    """Return logical indices of all stored tokens, int64 [B, Hk, N], in the order of storage.

    Sinks first, then the segment, which stores a padded row's sinks once more, then tokens that
    heads keep in different numbers; slots in no order. -1: a sink that a row has not reached yet,
    or no token. Raises `CacheMisuse` if the layer did not record them.
    """
    storage, like = state.storage, state.like
    if like is None:
        return torch.empty(0, 0, 0, dtype=torch.long)
    if isinstance(storage, SlotStorage):
        return storage.logical()
    ragged = state.ragged
    if ragged is not None and not ragged.stored:
        ragged = None
    unknown = storage.kept and storage.logical_index is None
    if unknown or (ragged and ragged.logical_index is None):
        raise CacheMisuse(
            f"{state.name}: the layer did not record which tokens it kept; call observe() before "
            "the first prompt"
        )
    parts = []
    if state.sinks is not None:
        parts.append(state.sinks.logical(state.seen)[:, None, :])
    if len(storage):
        parts.append(storage.step_index(like.device))
    if ragged is not None:
        parts.append(ragged.logical())
    return torch.cat([part.expand(*like.shape[:2], -1) for part in parts], dim=-1)
