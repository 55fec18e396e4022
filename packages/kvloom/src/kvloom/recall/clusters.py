"""Semantic clusters of keys (ClusterKV, arXiv:2412.03213, section III).

The prompt's keys are clustered once, generated keys in blocks among themselves. A query reads the
clusters whose centroids have the largest inner product with it. Departures: the prompt is divided
into as many equal ranges as there are clusters, and each range gives one seed, so that seeds are
distinct; generated tokens wait until they fill a block; by default a cluster has 40 tokens after at
most 10 iterations, where the paper has 80 and 20.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..kernels import ops
from ..kernels.select import reference as ref
from ..registry.fields import check_choice, check_whole
from .index import Finder, Index, grown


@dataclass(frozen=True)
class Clusters(Index):
    """Clusters of keys by K-means (ClusterKV, arXiv:2412.03213, section III).

    Attributes:
        size: Mean tokens in a cluster of the prompt.
        block: Generated tokens that are clustered together.
        block_clusters: How many clusters these form.
        distance: "cosine", "l2" or "inner".
        iterations: The most iterations of K-means.
        seed: Of the first centroids.
    """

    size: int = 40
    block: int = 320
    block_clusters: int = 8
    distance: str = "cosine"
    iterations: int = 10
    seed: int = 0
    kind: ClassVar[str] = "clusters"

    def __post_init__(self) -> None:
        for name in ("size", "block", "block_clusters", "iterations"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0, most=2**64 - 1)
        check_choice("distance", self.distance, ref.DISTANCES)
        if self.block_clusters > self.block:
            raise RecipeError(
                f"block_clusters={self.block_clusters} is more than the block={self.block} tokens "
                f"have room for; use {self.block} or fewer"
            )

    def finder(self) -> ClusterFinder:
        """Return an empty index."""
        return ClusterFinder(self)

    def due(self, indexed: int, waiting: int) -> int:
        """Return all tokens of a prompt, later whole blocks; a prompt below `size` tokens waits."""
        if indexed == 0:
            return waiting if waiting >= self.size else 0
        return self.block if waiting >= self.block else 0

    @property
    def block_tokens(self) -> int:
        """A block."""
        return self.block

    def nbytes(self, tokens: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of centroids, sizes, starts and flags, and of the tokens' order."""
        return tokens // self.size * (head_dim * itemsize + 4 + 4 + 1) + 4 * tokens


class ClusterFinder(Finder):
    """Clusters of one layer's keys.

    centroids [B, Hk, C, D] in the keys' dtype; size, start: int32 [B, Hk, C], where a cluster's
    tokens lie in order: int32 [B, Hk, N], slots by cluster, ascending in each. alive: bool
    [B, Hk, C], False for clusters that no query reads: of padding, or unused in a short row.
    """

    tensors = ("centroids", "size", "start", "order", "alive")
    centroids: Tensor
    size: Tensor
    start: Tensor
    order: Tensor
    alive: Tensor

    def __init__(self, options: Clusters) -> None:
        super().__init__()
        self.options = options

    def extend(self, keys: Tensor, nonpadding: Tensor) -> None:
        """Cluster keys [B, Hk, T, D] among themselves and add the clusters."""
        o, t = self.options, keys.shape[2]
        padded = not bool(nonpadding.all())
        clusters, per = (t // o.size, o.size) if self.tokens == 0 else (o.block_clusters, None)
        tokens = nonpadding.sum(dim=-1)  # [B, 1]
        count = (tokens // per if per else tokens).clamp(max=clusters)
        count = torch.where(tokens > 0, count.clamp_min(1), 0)
        generator = torch.Generator().manual_seed(o.seed)
        start = ref.seeds(nonpadding, count, clusters, generator)
        alive = torch.arange(clusters, device=keys.device) < count.unsqueeze(-1)  # [B, 1, C]
        centroids, labels = ops.kmeans(keys, start, nonpadding, alive, o.distance, o.iterations)
        size = ref.sizes(labels, clusters + 1)
        if not padded:
            size = size[..., :-1]
        else:  # padding is a cluster that no query reads
            centroids = torch.cat([centroids, torch.zeros_like(centroids[:, :, :1])], dim=2)
            alive = torch.cat([alive, torch.zeros_like(alive[..., :1])], dim=-1)
        order = labels.argsort(dim=-1, stable=True) + self.tokens
        begin = size.cumsum(dim=-1) - size + self.tokens
        for name, new in (
            ("centroids", centroids.to(keys.dtype)),
            ("size", size.int()),
            ("start", begin.int()),
            ("order", order.int()),
            ("alive", alive.expand(*size.shape).contiguous()),
        ):
            setattr(self, name, grown(getattr(self, name) if self.tokens else None, new))
        self.tokens += t

    def find(self, q: Tensor, tokens: int, query_heads: str, keys: Callable[[], Tensor]) -> Tensor:
        """Return the tokens of the best clusters; of the last one, the oldest that fit."""
        return self.choose(self.scores(q, query_heads), tokens)

    def choose(self, scores: Tensor, tokens: int) -> Tensor:
        """Return slots int64 [B, Hk or Hq, tokens] of the best clusters, by scores of `scores`."""
        return ops.select_clusters(scores, self.size, self.start, self.order, tokens)

    def parts(self) -> Tensor:
        """Return the cluster of each slot, int64 [B, Hk, N]."""
        end = (self.start + self.size).contiguous()  # clusters are consecutive in order
        rank = torch.arange(self.tokens, dtype=end.dtype, device=end.device)
        cluster = torch.searchsorted(end, rank.expand_as(self.order).contiguous(), right=True)
        return torch.empty_like(cluster).scatter_(2, self.order.long(), cluster)

    def scores(self, q: Tensor, query_heads: str) -> Tensor:
        """Return the scores of the clusters for queries [B, Hq, D], see `select.reference`."""
        return ops.cluster_scores(q, self.centroids, self.alive, query_heads)
