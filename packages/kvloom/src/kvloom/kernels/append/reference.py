"""Appending exact tokens to storage, in plain torch.

Decides what is written and which numbers are refused. The caller decides where the storage is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Sides = tuple[Tensor, ...]
"""Tensors [B, Hk, T, D] in one shape and dtype: a step's keys and its values."""


class WriteTarget(NamedTuple):
    """Where tokens are written: storage [B, Hk, N or more, D], from `row` on.

    row: the same row for all heads, or int64 [B, Hk, 1], one row for each head.
    """

    data: Tensor
    row: int | Tensor


def append(
    new: Sides, targets: tuple[WriteTarget, ...], max_abs: tuple[float, ...] | None = None
) -> bool:
    """Write the new tokens to their targets if they are `within` max_abs; None skips the check.

    Returns whether all tokens were written; if not, the targets may hold anything.
    """
    if max_abs is not None and not within(new, max_abs):
        return False
    for x, (data, row) in zip(new, targets, strict=True):
        if isinstance(row, Tensor):
            rows = row + torch.arange(x.shape[2], device=row.device)
            data.scatter_(2, rows.unsqueeze(-1).expand(x.shape), x)
        else:
            data[:, :, row : row + x.shape[2]] = x
    return True


def within(new: Sides, max_abs: tuple[float, ...]) -> bool:
    """Return whether all numbers are finite and at most their side's max_abs in magnitude."""
    for x, limit in zip(new, max_abs, strict=True):
        low, high = x.detach().aminmax()
        limit = min(limit, torch.finfo(x.dtype).max)
        if not (low.item() >= -limit and high.item() <= limit):  # False for NaN
            return False
    return True
