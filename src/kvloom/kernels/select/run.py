"""Clusters, pages and what is read of them, by whichever kernel covers the case."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import dispatch
from . import cpu, ref

COVERAGE = {
    "cpu": (
        "k-means, page bounds, ratings of clusters and pages and the choice among them; head_dim a "
        "multiple of 16 up to 512; keys and centroids in fp32, fp16, bf16"
    ),
}
"""What a backend covers; `ref` runs the rest."""


def _covered(operation: str, x: Tensor) -> bool:
    """Whether a kernel takes tensors like x; counts the answer."""
    _, why = dispatch.candidate(x)
    why = why or cpu.problems(x)
    dispatch.count(operation, "cpu", why)
    return not why


def kmeans(
    x: Tensor, start: Tensor, real: Tensor, alive: Tensor, distance: str, iterations: int
) -> tuple[Tensor, Tensor]:
    """As `ref.kmeans`."""
    kernel = cpu if _covered("kmeans", x) else ref
    return kernel.kmeans(x, start, real, alive, distance, iterations)


def cluster_scores(q: Tensor, centroids: Tensor, alive: Tensor, group: str) -> Tensor:
    """As `ref.cluster_scores`."""
    kernel = cpu if _covered("cluster_scores", centroids) else ref
    return kernel.cluster_scores(q, centroids, alive, group)


def select_clusters(scores: Tensor, size: Tensor, start: Tensor, order: Tensor, m: int) -> Tensor:
    """As `ref.select_clusters`."""
    kernel = cpu if _chooses("select_clusters", scores) else ref
    return kernel.select_clusters(scores, size, start, order, m)


def page_bounds(x: Tensor, page: int, real: Tensor) -> tuple[Tensor, Tensor]:
    """As `ref.page_bounds`."""
    hidden = None if bool(real.all()) else real
    kernel = cpu if _covered("page_bounds", x) else ref
    return kernel.page_bounds(x, page, hidden)


def page_scores(q: Tensor, low: Tensor, high: Tensor, group: str) -> Tensor:
    """As `ref.page_scores`."""
    kernel = cpu if _covered("page_scores", low) else ref
    return kernel.page_scores(q, low, high, group)


def select_pages(scores: Tensor, pages: int, page: int) -> Tensor:
    """As `ref.select_pages`."""
    kernel = cpu if _chooses("select_pages", scores) else ref
    return kernel.select_pages(scores, pages, page)


def _chooses(operation: str, scores: Tensor) -> bool:
    """Whether a kernel chooses by scores like these; counts the answer."""
    _, why = dispatch.candidate(scores)
    if not why and scores.dtype != torch.float32:
        why = [f"scores are {scores.dtype}, not fp32"]
    dispatch.count(operation, "cpu", why)
    return not why
