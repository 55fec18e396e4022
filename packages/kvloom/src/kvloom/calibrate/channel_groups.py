"""Groups of channels with similar ranges, by k-means (SKVQ, arXiv:2405.06219, section 3.1).

A channel is the point (minimum, maximum) of its calibrated values. Clusters are groups, of unequal
size. Departures: restarts are seeded, so that a calibration is reproducible, and no group is ever
empty, because the number of groups decides the bytes that a format predicts.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESTARTS = 10
_ROUNDS = 100


def group_channels(low: Tensor, high: Tensor, span: str, size: int) -> Tensor:
    """Return the group of each channel, int32 [Hk, D], from the ranges low, high [Hk, D].

    span: "head" groups the channels of each head separately, with equally many groups in each;
    "layer" groups channels of all heads together. size: the mean number of channels in a group.
    """
    heads, dim = low.shape
    points = torch.stack([low, high], dim=-1).double()  # [Hk, D, 2]
    if span == "layer":
        count = max(1, heads * dim // size)
        return kmeans(points.flatten(0, 1), count).view(heads, dim).int()
    count = dim // size
    return torch.stack([kmeans(points[h], count) + h * count for h in range(heads)]).int()


def kmeans(points: Tensor, count: int) -> Tensor:
    """Return the cluster 0 .. count - 1 of each point [N, 2], int64 [N]; no cluster is empty."""
    if count == 1:
        return torch.zeros(len(points), dtype=torch.long)
    best, best_loss = None, torch.inf
    for seed in range(RESTARTS):
        of = _restart(points, count, torch.Generator().manual_seed(seed))
        centers = _centers(points, of, count)
        loss = (points - centers[of]).square().sum().item()
        if loss < best_loss:
            best, best_loss = of, loss
    assert best is not None, "the recorder refuses NaN"
    return best


def _restart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    of, centers = torch.full((len(points),), -1), _initial_centers(points, count, generator)
    for _ in range(_ROUNDS):
        nearest = _fill_empty(points, centers, torch.cdist(points, centers).argmin(dim=1))
        if torch.equal(nearest, of):
            break
        of, centers = nearest, _centers(points, nearest, count)
    return of


def _initial_centers(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return initial centers by k-means++: distant points are drawn with higher probability."""
    first = torch.randint(len(points), (1,), generator=generator)
    centers = points[first]
    for _ in range(count - 1):
        weights = torch.cdist(points, centers).amin(dim=1).square()
        weights = weights if bool(weights.sum() > 0) else torch.ones_like(weights)
        centers = torch.cat([centers, points[torch.multinomial(weights, 1, generator=generator)]])
    return centers


def _fill_empty(points: Tensor, centers: Tensor, of: Tensor) -> Tensor:
    """Move the outermost member of the largest cluster to each empty cluster."""
    sizes = torch.bincount(of, minlength=len(centers))
    for empty in (sizes == 0).nonzero().flatten().tolist():
        members = (of == sizes.argmax()).nonzero().flatten()
        outermost = (points[members] - centers[sizes.argmax()]).square().sum(dim=1).argmax()
        of[members[outermost]] = empty
        sizes = torch.bincount(of, minlength=len(centers))
    return of


def _centers(points: Tensor, of: Tensor, count: int) -> Tensor:
    total = points.new_zeros(count, points.shape[1]).index_add_(0, of, points)
    return total / torch.bincount(of, minlength=count).unsqueeze(1)
