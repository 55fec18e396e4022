"""The range (minimum, maximum) of every channel over a text, and groups of channels by their range.

Decides when enough text is read. The state is saved as reading proceeds, so that an interrupted run
continues where it stopped.

Groups are found by k-means (SKVQ, arXiv:2405.06219, section 3.1). A channel is the point (minimum,
maximum) of its calibrated values. Clusters are groups, of unequal size. Departures: restarts are
seeded, so that a calibration is reproducible, and no group is ever empty, because the number of
groups decides the bytes that a format predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.recording import AttentionInputs
from ..positions.rope import Rope
from ..progress import TotalProgress
from ..store.calibration import Calibration
from .recorder import record

_CHECK_EVERY = 8  # contexts between two comparisons of the ranges; the state is saved then
_RESTARTS = 10  # of k-means
_ROUNDS = 100

CONTEXTS, FINISHED, LAYERS = range(3)
"""Indices into the saved state: contexts read, whether reading is finished, layers calibrated."""


def read_ranges(
    model: PreTrainedModel,
    ids: Tensor,
    calibration: Calibration,
    partial: Path,
    ropes: Mapping[int, Rope],
    settled: float,
    on_step: TotalProgress,
) -> None:
    """Add the ranges of all layers over contexts ids [M, T] to `calibration`; save it to `partial`.

    Continues from the state in `calibration`. ropes: also measure the keys of these layers before
    RoPE. settled: see `Settings`.
    """
    done, before = calibration.tensors["done"], _ranges(calibration)
    while not done[FINISHED]:
        context = int(done[CONTEXTS])
        on_step("reading contexts", context, len(ids))
        record(
            model,
            ids[context : context + 1],
            lambda layer, inputs: _widen(calibration.tensors, layer, inputs, ropes.get(layer)),
        )
        done[CONTEXTS] = context + 1
        last = context + 1 == len(ids)
        if last or (context + 1) % _CHECK_EVERY == 0:
            current = _ranges(calibration)
            done[FINISHED] = last or bool(before and _share_added(before, current) < settled)
            before = current
            calibration.save(partial)


def _ranges(calibration: Calibration) -> dict[str, Tensor]:
    return {name: x for name, x in calibration.tensors.items() if name.startswith("range.")}


def _share_added(before: dict[str, Tensor], current: dict[str, Tensor]) -> float:
    """Return the share of the current ranges [2, Hk, D] that is new, the mean over channels."""
    shares = []
    for name, ends in current.items():
        width, width_before = ends[1] - ends[0], before[name][1] - before[name][0]
        shares.append(torch.where(width > 0, (width - width_before) / width, 0.0).mean())
    return float(torch.stack(shares).mean())


def _widen(
    tensors: dict[str, Tensor], layer: int, inputs: AttentionInputs, rope: Rope | None
) -> None:
    """Widen a layer's ranges so that they include the keys and values of these inputs."""
    kinds = {"keys": inputs.k.float(), "values": inputs.v.float()}
    if rope is not None:
        positions = torch.arange(inputs.k.shape[2]).view(1, 1, -1)
        kinds["raw_keys"] = rope.rotate(kinds["keys"], -positions)
    for kind, x in kinds.items():
        low, high = x.amin(dim=(0, 2)).cpu(), x.amax(dim=(0, 2)).cpu()  # [Hk, D]
        before = tensors.get(f"range.{layer}.{kind}")
        if before is not None:
            low, high = torch.minimum(low, before[0]), torch.maximum(high, before[1])
        tensors[f"range.{layer}.{kind}"] = torch.stack([low, high])


def group_channels(low: Tensor, high: Tensor, span: str, size: int) -> Tensor:
    """Return the group of each channel, int32 [Hk, D], from the ranges low, high [Hk, D].

    span: "head" groups the channels of each head separately, with equally many groups in each;
    "layer" groups channels of all heads together. size: the mean number of channels in a group; 0:
    all of a head.
    """
    heads, dim = low.shape
    points = torch.stack([low, high], dim=-1).double()  # [Hk, D, 2]
    if span == "layer":
        count = max(1, heads * dim // size)
        return kmeans(points.flatten(0, 1), count).view(heads, dim).int()
    count = dim // (size or dim)
    return torch.stack([kmeans(points[h], count) + h * count for h in range(heads)]).int()


def kmeans(points: Tensor, count: int) -> Tensor:
    """Return the cluster 0 .. count - 1 of each point [N, 2], int64 [N]; no cluster is empty."""
    if count == 1:
        return torch.zeros(len(points), dtype=torch.long)
    best_cluster_of, best_loss = None, torch.inf
    for seed in range(_RESTARTS):
        cluster_of = _restart(points, count, torch.Generator().manual_seed(seed))
        centers = _centers(points, cluster_of, count)
        loss = (points - centers[cluster_of]).square().sum().item()
        if loss < best_loss:
            best_cluster_of, best_loss = cluster_of, loss
    assert best_cluster_of is not None, "the recorder refuses NaN"
    return best_cluster_of


def _restart(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    cluster_of, centers = torch.full((len(points),), -1), _initial_centers(points, count, generator)
    for _ in range(_ROUNDS):
        nearest = _fill_empty(points, centers, torch.cdist(points, centers).argmin(dim=1))
        if torch.equal(nearest, cluster_of):
            break
        cluster_of, centers = nearest, _centers(points, nearest, count)
    return cluster_of


def _initial_centers(points: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return initial centers by k-means++: distant points are drawn with higher probability."""
    first = torch.randint(len(points), (1,), generator=generator)
    centers = points[first]
    for _ in range(count - 1):
        weights = torch.cdist(points, centers).amin(dim=1).square()
        weights = weights if bool(weights.sum() > 0) else torch.ones_like(weights)
        centers = torch.cat([centers, points[torch.multinomial(weights, 1, generator=generator)]])
    return centers


def _fill_empty(points: Tensor, centers: Tensor, cluster_of: Tensor) -> Tensor:
    """Move the outermost member of the largest cluster to each empty cluster."""
    sizes = torch.bincount(cluster_of, minlength=len(centers))
    for empty in (sizes == 0).nonzero().flatten().tolist():
        members = (cluster_of == sizes.argmax()).nonzero().flatten()
        outermost = (points[members] - centers[sizes.argmax()]).square().sum(dim=1).argmax()
        cluster_of[members[outermost]] = empty
        sizes = torch.bincount(cluster_of, minlength=len(centers))
    return cluster_of


def _centers(points: Tensor, cluster_of: Tensor, count: int) -> Tensor:
    total = points.new_zeros(count, points.shape[1]).index_add_(0, cluster_of, points)
    return total / torch.bincount(cluster_of, minlength=count).unsqueeze(1)
