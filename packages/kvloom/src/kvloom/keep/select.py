"""Choose the tokens that stay, given their scores."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(scores: Tensor, heavy: int, recent: int, visible: Tensor | None = None) -> Tensor | None:
    """Return the slots of the `heavy` best-scored tokens and of the newest `recent`, ascending.

    scores: fp32 [B, Hk, N], plus infinity for tokens that must stay. visible: bool [B, 1 or Hk, N],
    False for padding, which is chosen only where a row has too few other tokens. Returns int64
    [B, Hk, heavy + recent], or None where every token is chosen.
    """
    n = scores.shape[-1]
    recent = min(recent, n)
    if heavy + recent >= n:
        return None
    best = older(scores, recent, visible).topk(heavy, dim=-1).indices.sort(dim=-1).values
    newest = torch.arange(n - recent, n, device=scores.device).expand(*scores.shape[:2], -1)
    return torch.cat([best, newest], dim=-1)


def older(scores: Tensor, recent: int, visible: Tensor | None) -> Tensor:
    """Return the scores of all tokens but the newest `recent`, minus infinity for padding."""
    of_older = scores[..., : scores.shape[-1] - recent]
    if visible is None:
        return of_older
    return of_older.masked_fill(~visible[..., : of_older.shape[-1]], -torch.inf)


def sinks_first(slots: Tensor, sinks: Tensor, visible: Tensor) -> Tensor:
    """Return slots int64 [B, Hk, M] with a row's sinks first, padding next, then all others by age.

    slots: ascending. sinks: bool [B, Hk, N]. visible: bool [B, 1, N], False for padding.
    """
    order = torch.where(visible.expand(-1, sinks.shape[1], -1), 2, 1)
    order = order.masked_fill_(sinks, 0).gather(2, slots)
    return slots.gather(2, order.argsort(dim=-1, stable=True))


PROTECTED = 1e30
"""The score of tokens that a recipe marks: above all others but that of sinks, infinity."""


def protect_sinks(scores: Tensor, sinks: int, visible: Tensor | None) -> Tensor:
    """Return scores [B, Hk, N] with plus infinity for each row's first `sinks` visible tokens."""
    if sinks == 0:
        return scores
    first = first_tokens(scores.shape[-1], sinks, visible, scores.device)
    return scores.masked_fill(first, torch.inf)


def first_tokens(n: int, count: int, visible: Tensor | None, device: torch.device) -> Tensor:
    """Return each row's first `count` visible tokens of n, as a mask bool [B or 1, 1 or Hk, N].

    visible: bool [B, 1 or Hk, N], False for padding.
    """
    if visible is None:
        return torch.arange(n, device=device)[None, None] < count
    return visible & (visible.cumsum(dim=-1) <= count)
