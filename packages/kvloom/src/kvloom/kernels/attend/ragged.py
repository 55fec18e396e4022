"""Attention of heads that have different numbers of tokens, in plain torch.

The tokens of all heads lie one after the other, and a table has the span of each head: there is no
padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .kv_view import KVView
from .reference import State, attend


class Spans(NamedTuple):
    """Where the tokens of each key/value head are: its first token, and how many it has.

    bounds: int64 [B, Hk, 2]. longest: the most tokens of a head.
    """

    bounds: Tensor
    longest: int


def attend_ragged(
    q: Tensor,
    keys: KVView,
    values: KVView,
    spans: Spans,
    scale: float,
    *,
    visible: Tensor | None = None,
    softcap: float | None = None,
) -> State:
    """Attend q [B, Hq, T, D], each key/value head of each row to its own tokens.

    keys, values: the tokens of all heads, [1, 1, M, D], all packed or all exact. visible: bool
    [B, Hk, spans.longest], False hides a token; behind a head's last token it is not read. The rest
    is as in `reference.attend`.
    """
    b, hq, t, d = q.shape
    heads = spans.bounds.shape[1]
    rows = q.reshape(b * heads, hq // heads, t, d)
    states = []
    for i, (first, count) in enumerate(spans.bounds.view(-1, 2).tolist()):
        k, v = (_tokens(view, first, first + count) for view in (keys, values))
        see = None if visible is None else visible.reshape(b * heads, 1, -1)[i : i + 1, :, :count]
        states.append(attend(rows[i : i + 1], k, v, scale, visible=see, softcap=softcap))
    out, lse = torch.cat([s.out for s in states]), torch.cat([s.lse for s in states])
    return State(out.view(b, hq, t, -1), lse.view(b, hq, t))


def _tokens(view: KVView, lo: int, hi: int) -> Tensor:
    """Return the tokens lo to hi, unpacked: [1, 1, hi - lo, D]."""
    packed = view.packed
    if packed is None:
        return view.tail[:, :, lo:hi]
    if lo == hi:
        return view.tail[:, :, :0]
    return packed._replace(lo=lo, hi=hi).tensor()  # type: ignore[attr-defined]
