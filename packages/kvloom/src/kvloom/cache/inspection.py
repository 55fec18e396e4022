"""What measurements need of a layer's cache: fill it without attention, and see what it holds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .layer import LayerCache
from .reading import index_mask
from .segment import Segment
from .step import Queries, StepInputs


class LayerContents(NamedTuple):
    """What a layer holds of the first row of a batch, of `seen` tokens and Hk heads.

    Attributes:
        kept: Whether a token is in the cache, bool [Hk, seen].
        packed: By "keys" and "values", whether it is packed, bool [Hk, seen].
        selectable: With recall, whether the next step may leave it out, bool [Hk, seen].
        indexed: With recall, whether it is in the index, bool [Hk, seen].
        parts: With recall, the number of its cluster or page, int64 [Hk, seen]; -1: none.
        recalled: The tokens that the last step recalled, bool [Hk, seen]; None: it read all. Needs
            `LayerCache.observe`.
        scores: Indices int64 and scores fp32, both [Hk, N], of the last eviction's candidates;
            needs `LayerCache.observe`. The same object until the next eviction.
        budget_tokens: The tokens that each head may keep; None where nothing is evicted.
        by_score: Whether the layer evicts by scores.
    """

    kept: Tensor
    packed: dict[str, Tensor]
    selectable: Tensor
    indexed: Tensor
    parts: Tensor
    recalled: Tensor | None
    scores: tuple[Tensor, Tensor] | None
    budget_tokens: int | None
    by_score: bool


def layer_contents(layer: LayerCache) -> LayerContents:
    """Return what a layer holds after a step, on the CPU.

    Raises `CacheMisuse` if the layer did not record which tokens it kept: call its `observe` before
    the first prompt.
    """
    state, seen = layer._state, layer.seen
    index = layer.logical()[0].cpu()
    kept = index_mask(index, seen)
    no_token = torch.zeros_like(kept)
    begin = 0 if state.sinks is None else state.sinks.count
    body, evictor, trace = index[:, begin:], state.evictor, state.trace
    selectable, indexed, recalled = no_token, no_token, None
    parts = torch.full(kept.shape, -1)
    if state.retriever is not None:
        prefix, tokens = layer.recipe.pinned_prefix, state.retriever.finder.tokens
        if tokens:
            selectable = index_mask(body[:, : prefix + tokens], seen)
            inside = body[:, prefix : prefix + tokens]
            indexed, token_parts = index_mask(inside, seen), state.retriever.finder.parts()
            if token_parts is not None:
                parts.scatter_(1, inside, token_parts[0].cpu())
        if trace is not None and trace.recalled is not None:
            slots = trace.recalled[0].reshape(len(kept), -1).cpu()
            recalled = index_mask(body.gather(1, slots), seen)
    return LayerContents(
        kept,
        {side: _packed(layer, side, index, begin) for side in ("keys", "values")},
        selectable,
        indexed,
        parts,
        recalled,
        None if trace is None else trace.scored,
        None if evictor is None else evictor.budget_tokens,
        evictor is not None and not evictor.keep.by_age,
    )


def _packed(layer: LayerCache, side: str, index: Tensor, begin: int) -> Tensor:
    """Return which tokens of one side are packed; `begin`: the first column of the segment."""
    tokens, ragged = layer._state.storage, layer._state.ragged
    packed = [index[:, :0]]
    if isinstance(tokens, Segment):
        stored = getattr(tokens, side)
        offloaded = 0 if stored.packed is None else tokens.offloaded
        packed.append(index[:, begin : begin + offloaded + stored.packed_count])
        if ragged is not None and getattr(ragged, side).packed is not None:
            packed.append(index[:, begin + len(tokens) :])  # all packed at once
    return index_mask(torch.cat(packed, dim=1), layer.seen)


def holds_packed(layer: LayerCache) -> bool:
    """Return whether a layer has packed any token."""
    storage, ragged = layer._state.storage, layer._state.ragged
    if ragged is not None and (ragged.keys.packed_count or ragged.values.packed_count):
        return True
    return isinstance(storage, Segment) and storage.has_packed


def fill(layer: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Store a prompt in an empty layer without computing its attention.

    Args:
        layer: The layer.
        q: The last queries of the prompt [B, Hq, T, D], from which scores are computed. A rule that
            needs a repetition of the prompt scores them as if they repeated all of it.
        k: Keys [B, Hk, N, D].
        v: Values [B, Hk, N, D].
    """
    queries, tokens = Queries(q, k.shape[3] ** -0.5), k.shape[2]
    layer.prefill(StepInputs(queries, k, v))
    if layer.repetition is not None:
        first = tokens - q.shape[2]
        layer.repeat(StepInputs(queries, k[:, :, first:], v[:, :, first:]), (0, tokens))
        layer.end_repetition()
    layer.forget_undo()


def read_nbytes(layer: LayerCache) -> int:
    """Return the bytes that the last step read: the whole cache, or the index and its selection.

    Where query heads choose for themselves, those of one head count: heads may share tokens.
    """
    retriever = layer._state.retriever
    if retriever is None or not layer.seen:
        return layer.nbytes
    index, stored = retriever.finder.nbytes, layer.seen - layer.dropped
    share = retriever.recall.share_read(layer._state.tokens_read, stored, layer.latent)
    return index + round((layer.nbytes - index) * share)
