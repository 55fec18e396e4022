"""Which parts a step attends to, and which tokens a layer stores.

Decides the order of the parts: outliers, sinks, the other tokens (all or those recalled), the
step's own tokens where they are not stored yet, and those of which heads have different numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CacheMisuse
from .gathered_part import prepend_sinks
from .layer_state import LayerState
from .part import Part, RaggedPart
from .slots import Slots
from .step import Queries, StepInputs


def step_parts(layer: LayerState, step: StepInputs, stored: bool) -> list[Part | RaggedPart]:
    """Return the parts that a step attends to: stored or recalled tokens, and its own.

    stored: whether the layer has stored the step's own tokens already.
    """
    queries, k, v = step
    t, past = k.shape[2], layer.seen
    parts: list[Part | RaggedPart] = []
    if past:
        parts += _past_parts(layer, queries, t if stored else 0)
    if not stored:
        bias = None
        if queries.alibi is not None:
            index = torch.arange(past, past + t, device=k.device)
            bias = queries.alibi.bias(index.expand(1, 1, -1))
        visible = None if queries.visible is None else queries.visible[:, :, past:]
        parts.append(Part(k, v, visible, causal=t, bias=bias))
    if layer.evictor is not None and layer.evictor.ragged is not None:
        parts += layer.evictor.ragged.parts(queries.visible)
    return parts


def _past_parts(layer: LayerState, queries: Queries, present: int) -> list[Part]:
    """Return the stored tokens that a step reads; the last `present` of them are its own."""
    visible, alibi, tokens, parts = queries.visible, queries.alibi, layer.tokens, []
    evictor, seen = layer.evictor, layer.seen
    if isinstance(tokens, Slots):
        return layer.score_evictor.renumbered(tokens.parts(visible, alibi), tokens, seen)
    if layer.outliers is not None:
        parts = layer.outliers.parts(visible, alibi)
        visible = layer.outliers.hide(visible, seen + present)
    if layer.sinks is not None:
        sinks = layer.sinks.part(seen, visible, alibi, tokens.first)
        if layer.rope is not None:
            by = layer.sinks.behind(tokens.first)
            sinks = sinks._replace(keys=layer.rope.rotate(sinks.exact_keys, by))
        parts.append(sinks)
        visible = layer.sinks.hide(visible)
    if parts and not len(tokens):
        return parts
    if layer.retriever is not None:
        read = layer.retriever.read(tokens, queries, visible, alibi, present, layer.trace)
        if len(parts) == len(read) == 1 and read[0].plan is not None:
            return [prepend_sinks(parts[0], read[0])]
        return [*parts, *read]
    parts += tokens.parts(visible, present, alibi)
    if evictor is None:
        return parts
    return evictor.renumbered(parts, tokens, seen + present - 1)


def marked(index: Tensor, tokens: int) -> Tensor:
    """Return the tokens that indices int64 [..., N] name, bool [..., tokens]; -1: no token."""
    found = torch.zeros(*index.shape[:-1], tokens + 1, dtype=torch.bool, device=index.device)
    return found.scatter_(-1, index.masked_fill(index < 0, tokens), True)[..., :tokens]


def logical(layer: LayerState) -> Tensor:
    """Return logical indices of all stored tokens, int64 [B, Hk, N], in the order of storage.

    Sinks first, then the segment, which stores a padded row's sinks once more, then tokens that
    heads keep in different numbers; slots in no order. -1: a sink that a row has not reached yet,
    or no token. Raises `CacheMisuse` if the layer did not record them.
    """
    tokens, like = layer.tokens, layer.like
    if like is None:
        return torch.empty(0, 0, 0, dtype=torch.long)
    if isinstance(tokens, Slots):
        return tokens.logical()
    ragged = None if layer.evictor is None else layer.evictor.ragged
    if ragged is not None and not ragged.stored:
        ragged = None
    if (tokens.kept and tokens.index is None) or (ragged and ragged.index is None):
        raise CacheMisuse(
            f"{layer.name}: the layer did not record which tokens it kept; call observe() before "
            "the first prompt"
        )
    parts = []
    if layer.sinks is not None:
        parts.append(layer.sinks.logical(layer.seen)[:, None, :])
    if len(tokens):
        parts.append(tokens.logical(0, len(tokens), like.device))
    if ragged is not None:
        parts.append(ragged.logical())
    return torch.cat([part.expand(*like.shape[:2], -1) for part in parts], dim=-1)
