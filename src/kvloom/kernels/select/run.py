"""Clusters, pages and what is read of them, by whichever kernel covers the case."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch
from . import reference as ref
from .cpu import select as cpu

COVERAGE = {
    "cpu": (
        "k-means, page bounds, ratings of clusters and pages and the choice among them; head_dim a "
        "multiple of 16 up to 512; keys and centroids in fp32, fp16, bf16"
    ),
}
"""What a backend covers; `ref` runs the rest."""

_ON_GPU = ["torch runs it on CUDA tensors"]


def kmeans(
    x: Tensor, start: Tensor, real: Tensor, alive: Tensor, distance: str, iterations: int
) -> tuple[Tensor, Tensor]:
    """As `ref.kmeans`."""
    return _by("kmeans", x).kmeans(x, start, real, alive, distance, iterations)


def cluster_scores(q: Tensor, centroids: Tensor, alive: Tensor, group: str) -> Tensor:
    """As `ref.cluster_scores`."""
    return _by("cluster_scores", centroids).cluster_scores(q, centroids, alive, group)


def select_clusters(scores: Tensor, size: Tensor, start: Tensor, order: Tensor, m: int) -> Tensor:
    """As `ref.select_clusters`."""
    kernel = _chooses("select_clusters", scores)
    return kernel.select_clusters(scores, size, start, order, m)


def page_bounds(x: Tensor, page: int, real: Tensor) -> tuple[Tensor, Tensor]:
    """As `ref.page_bounds`."""
    kernel = _by("page_bounds", x)
    if real.is_cpu and bool(real.all()):  # on a GPU this would wait for the device
        return kernel.page_bounds(x, page, None)
    return kernel.page_bounds(x, page, real)


def page_scores(q: Tensor, low: Tensor, high: Tensor, group: str) -> Tensor:
    """As `ref.page_scores`."""
    return _by("page_scores", low).page_scores(q, low, high, group)


def select_pages(scores: Tensor, pages: int, page: int) -> Tensor:
    """As `ref.select_pages`."""
    return _chooses("select_pages", scores).select_pages(scores, pages, page)


def _by(operation: str, x: Tensor) -> Any:
    """Whose operation takes keys, centroids or bounds like x; counts the answer."""
    backend, why = dispatch.candidate(x)
    why = why or (cpu.problems(x) if backend == "cpu" else _ON_GPU)
    dispatch.count(operation, backend, why)
    return ref if why else cpu


def _chooses(operation: str, scores: Tensor) -> Any:
    """Whose operation chooses by scores like these; counts the answer."""
    backend, why = dispatch.candidate(scores)
    if not why and scores.dtype != torch.float32:
        why = [f"scores are {scores.dtype}, not fp32"]
    if not why and backend == "gpu":
        why = _ON_GPU
    dispatch.count(operation, backend, why)
    return ref if why else cpu
