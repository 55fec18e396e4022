"""The tokens that a recalling step reads, as one part.

Decides that recalled tokens, all later tokens and the sinks are one part, which a kernel reads in
place. Where no kernel can read it, attention runs over its pieces one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..kernels.attend.kv_view import KVView
from .part import Part
from .selection import Selection

Gather = Callable[[], tuple[Tensor, Tensor]]
"""Returns the recalled keys and values [B, H, M, D]."""


def gather_part(
    views: tuple[KVView, KVView],
    slots: Tensor,
    begin: int,
    visible: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    rest: Callable[[], list[Part]],
    gather: Gather,
) -> Part:
    """Return the tokens at slots int64 [B, H, M] of keys and values, and all from `begin` on.

    visible: bool [B, 1 or H, M] and [B, 1 or Hk, N - begin]. bias: fp32 [B or 1, Hq, M] and
    [B or 1, Hq, N - begin]. rest: returns the tokens from `begin` on; the last is the step's own.
    """

    def pieces() -> list[Part]:
        return [Part(*gather(), visible[0], bias=bias[0]), *rest()]

    masks = list(zip(visible, (slots.shape[2], views[0].tokens - begin), strict=True))
    selection, both = Selection(slots, begin), _joined_bias(list(bias))
    mask = _joined_mask(slots, masks)
    return Part(*views, mask, bias=both, selection=selection, pieces=pieces)


def prepend_sinks(sinks: Part, part: Part) -> Part:
    """Return a part of `gather_part` with exact tokens before it."""
    selection, pieces = part.selection, part.pieces
    assert selection is not None
    assert pieces is not None
    assert selection.first is None
    assert isinstance(sinks.keys, Tensor)
    assert isinstance(sinks.values, Tensor)
    masks = [(sinks.visible, sinks.tokens), (part.visible, part.tokens)]
    return part._replace(
        visible=_joined_mask(selection.slots, masks),
        bias=_joined_bias([sinks.bias, part.bias]),
        selection=selection._replace(first=(sinks.keys, sinks.values)),
        pieces=partial(_with, sinks, pieces),
    )


def _with(first: Part, pieces: Callable[[], list[Part]]) -> list[Part]:
    return [first, *pieces()]


def _joined_mask(slots: Tensor, parts: list[tuple[Tensor | None, int]]) -> Tensor | None:
    """Join masks [B, 1 or Hk or H, n] to one, bool [B, H, tokens]; None if no part has a mask."""
    if all(mask is None for mask, _ in parts):
        return None
    b, h, _ = slots.shape
    masks = [
        slots.new_ones(b, h, n, dtype=torch.bool)
        if mask is None
        else mask.repeat_interleave(h // mask.shape[1], dim=1)
        for mask, n in parts
    ]
    return torch.cat(masks, dim=2)


def _joined_bias(parts: list[Tensor | None]) -> Tensor | None:
    """Return one bias fp32 [B or 1, Hq, tokens]; None if no part has one (all have, or none)."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    assert len(given) == len(parts)
    rows = max(part.shape[0] for part in given)
    return torch.cat([part.expand(rows, -1, -1) for part in given], dim=2)
