"""What a step that recalls reads, as one piece to attend to.

Decides that chosen tokens, those behind them and the sinks are one piece of two strands, which a
kernel reads where it lies; where none does, each part is attended to by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..kernels.attend.kv_view import KVView
from .segment import Choice, Piece

Gather = Callable[[], tuple[Tensor, Tensor]]
"""Gives the chosen keys and values [B, H, M, D]."""


def chosen(
    strands: tuple[KVView, KVView],
    slots: Tensor,
    begin: int,
    valid: Sequence[Tensor | None],
    bias: Sequence[Tensor | None],
    rest: Callable[[], list[Piece]],
    gather: Gather,
) -> Piece:
    """The tokens at slots int64 [B, H, M] of keys and values, and all from `begin` on.

    valid: bool [B, 1 or H, M] and [B, 1 or Hk, N - begin]. bias: fp32 [B or 1, Hq, M] and
    [B or 1, Hq, N - begin]. rest: gives what is from `begin` on as pieces, the last token the
    step's.
    """

    def parts() -> list[Piece]:
        return [Piece(*gather(), valid[0], bias=bias[0]), *rest()]

    masks = list(zip(valid, (slots.shape[2], strands[0].tokens - begin), strict=True))
    choice, both = Choice(slots, begin), _bias(list(bias))
    return Piece(*strands, _mask(slots, masks), bias=both, choice=choice, parts=parts)


def behind(first: Piece, piece: Piece) -> Piece:
    """The same piece with exact tokens before it."""
    choice, parts = piece.choice, piece.parts
    assert choice is not None
    assert parts is not None
    assert choice.first is None
    assert isinstance(first.keys, Tensor)
    assert isinstance(first.values, Tensor)
    masks = [(first.valid, first.tokens), (piece.valid, piece.tokens)]
    return piece._replace(
        valid=_mask(choice.slots, masks),
        bias=_bias([first.bias, piece.bias]),
        choice=choice._replace(first=(first.keys, first.values)),
        parts=partial(_with, first, parts),
    )


def _with(first: Piece, parts: Callable[[], list[Piece]]) -> list[Piece]:
    return [first, *parts()]


def _mask(slots: Tensor, parts: list[tuple[Tensor | None, int]]) -> Tensor | None:
    """One mask bool [B, H, tokens] of parts' masks [B, 1, Hk or H, n]; None where none has one."""
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


def _bias(parts: list[Tensor | None]) -> Tensor | None:
    """One bias fp32 [B or 1, Hq, tokens]; a model has ALiBi or has not."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    assert len(found) == len(parts)
    most = max(part.shape[0] for part in found)
    return torch.cat([part.expand(most, -1, -1) for part in found], dim=2)
