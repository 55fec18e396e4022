"""Channels that are alike, by KMeans (SKVQ, arXiv:2405.06219, section 3.1).

A channel is the point (minimum, maximum) of its calibrated values; clusters are groups, of unequal
size. Departures: restarts are seeded, so that a calibration is the same every time, and no group
is ever empty (a group more or less would change the bytes that a format predicts).
"""

from __future__ import annotations

import torch
from torch import Tensor

RESTARTS = 10
_ROUNDS = 100


def group(low: Tensor, high: Tensor, span: str, size: int) -> Tensor:
    """Group channels by their ranges low, high [Hk, D]: int32 [Hk, D], `size` of them on average.

    span "head": as many groups in each head, of that head's channels alone; "layer": of any.
    """
    heads, dim = low.shape
    points = torch.stack([low, high], dim=-1).double()  # [Hk, D, 2]
    if span == "layer":
        count = max(1, heads * dim // size)
        return kmeans(points.flatten(0, 1), count).view(heads, dim).int()
    count = dim // size
    return torch.stack([kmeans(points[h], count) + h * count for h in range(heads)]).int()


def kmeans(points: Tensor, count: int) -> Tensor:
    """Clusters 0 .. count - 1 of points [N, 2], int64 [N], every one with a member."""
    if count == 1:
        return torch.zeros(len(points), dtype=torch.long)
    best, least = None, torch.inf
    for seed in range(RESTARTS):
        of = _restart(points, count, torch.Generator().manual_seed(seed))
        centers = _centers(points, of, count)
        loss = (points - centers[of]).square().sum().item()
        if loss < least:
            best, least = of, loss
    assert best is not None, "NaN is refused before"
    return best


def _restart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    of, centers = torch.full((len(points),), -1), _spread_out(points, count, generator)
    for _ in range(_ROUNDS):
        nearest = _fill(points, centers, torch.cdist(points, centers).argmin(dim=1))
        if torch.equal(nearest, of):
            break
        of, centers = nearest, _centers(points, nearest, count)
    return of


def _spread_out(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """First centers by k-means++: each next one far from those there are, by chance."""
    first = torch.randint(len(points), (1,), generator=generator)
    centers = points[first]
    for _ in range(count - 1):
        far = torch.cdist(points, centers).amin(dim=1).square()
        far = far if bool(far.sum() > 0) else torch.ones_like(far)
        centers = torch.cat([centers, points[torch.multinomial(far, 1, generator=generator)]])
    return centers


def _fill(points: Tensor, centers: Tensor, of: Tensor) -> Tensor:
    """Give every empty cluster the member of the largest one that lies farthest out."""
    sizes = torch.bincount(of, minlength=len(centers))
    for empty in (sizes == 0).nonzero().flatten().tolist():
        members = (of == sizes.argmax()).nonzero().flatten()
        out = (points[members] - centers[sizes.argmax()]).square().sum(dim=1).argmax()
        of[members[out]] = empty
        sizes = torch.bincount(of, minlength=len(centers))
    return of


def _centers(points: Tensor, of: Tensor, count: int) -> Tensor:
    total = points.new_zeros(count, points.shape[1]).index_add_(0, of, points)
    return total / torch.bincount(of, minlength=count).unsqueeze(1)
