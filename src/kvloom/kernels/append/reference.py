"""What it means to append exact tokens: the reference, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Sides = tuple[Tensor, ...]
"""Tensors [B, Hk, T, D] in one shape and dtype: a step's keys and its values."""


class Room(NamedTuple):
    """Where tokens go: storage [B, Hk, N or more, D], from row `at` on.

    at: the same for all heads, or int64 [B, Hk, 1], each head's own.
    """

    data: Tensor
    at: int | Tensor


def append(new: Sides, rooms: tuple[Room, ...], most: tuple[float, ...] | None) -> bool:
    """Write the new tokens into their rooms if they are `within` most, which nobody asks if None.

    Returns whether all is written; where not, rooms may hold anything.
    """
    if most is not None and not within(new, most):
        return False
    for x, (data, at) in zip(new, rooms, strict=True):
        if isinstance(at, Tensor):
            rows = at + torch.arange(x.shape[2], device=at.device)
            data.scatter_(2, rows.unsqueeze(-1).expand(x.shape), x)
        else:
            data[:, :, at : at + x.shape[2]] = x
    return True


def within(new: Sides, most: tuple[float, ...]) -> bool:
    """Whether all numbers are finite and no larger than most of their side, in magnitude."""
    for x, limit in zip(new, most, strict=True):
        low, high = x.detach().aminmax()
        limit = min(limit, torch.finfo(x.dtype).max)
        if not (low.item() >= -limit and high.item() <= limit):  # not so for NaN
            return False
    return True
