"""Clusters and pages on CUDA tensors: which cases, and how the kernels are called.

Nothing here waits for the device. What is not covered is said in sentences; seeds, sizes, topk and
gathering are torch's everywhere. Importing this does not import Triton, the first call does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import cuda
from .ref import DISTANCES, together

if TYPE_CHECKING:
    from ..ahead import Form

_WIDEST = 256  # head dimension
_STRETCHES = 8  # at most, into which the tokens of a sum are divided


def problems(x: Tensor, q: Tensor | None = None) -> list[str]:
    """Why keys x [B, Hk, N, D], rated by queries q, are left to another backend."""
    found = cuda.problems(x, _WIDEST)
    if q is not None and q.dtype != x.dtype:
        found.append(f"queries are {q.dtype}, keys {x.dtype}")
    return found


def kmeans(
    x: Tensor, start: Tensor, real: Tensor, alive: Tensor, distance: str, iterations: int
) -> tuple[Tensor, Tensor]:
    """Cluster keys x [B, Hk, N, D] as `ref.kmeans` does, without waiting for the device."""
    b, h, _, d = x.shape
    index = start.unsqueeze(-1).expand(b, h, start.shape[2], d)
    centroids = x.gather(2, index).float().contiguous()
    return _clusters(x, centroids, real, alive, distance, iterations)


def nearest(x: Tensor, centroids: Tensor, distance: str, alive: Tensor) -> Tensor:
    """The living centroid nearest to each key, int64 [B, Hk, N], as `ref.nearest` says."""
    return _clusters(x, centroids.float().clone(), None, alive, distance, 0)[1]


def _clusters(
    x: Tensor,
    centroids: Tensor,
    real: Tensor | None,
    alive: Tensor,
    distance: str,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """Iterate from these centroids, which change; with no iteration, only label keys by them."""
    (b, h, n, d), c, device = x.shape, centroids.shape[2], x.device
    x, kernels, lines = _channels_together(x), _kernels(), b * h
    labels = torch.empty(b, h, n, dtype=torch.int32, device=device)
    if not labels.numel() or not c:
        return centroids, labels.fill_(c).long()
    changed = torch.ones(1 + iterations, dtype=torch.int32, device=device)
    changed[1:].zero_()  # the first iteration changes every label
    exact = x.dtype == torch.float32
    dk = min(cuda.room(d), 32 if exact else 128 if d <= 128 else 64)
    chunks, side = -(-d // dk), 32 if exact else 64
    weights, offset = x.new_empty(b, h, c, d), centroids.new_empty(b, h, c)
    stretches = max(1, min(_STRETCHES, n // 2048))
    stretch = -(-n // stretches // side) * side
    sums = centroids.new_empty(stretches, b, h, c, d)
    counts = centroids.new_empty(stretches, b, h, c)
    alive = alive.contiguous().view(torch.uint8)
    seen = alive if real is None else real.contiguous().view(torch.uint8)

    def finish(known: int) -> None:
        cuda.launch(
            kernels.finish, (-(-c // 16), lines), x,
            centroids, weights, offset, alive, sums, counts, c, h, d, known,
            *_steps(alive), DB=cuda.room(d), CLUSTERS=16,
            DISTANCE=DISTANCES.index(distance),
        )  # fmt: skip

    finish(0)
    for number in range(max(1, iterations)):
        tile: dict[str, Any] = {"DK": dk, "CHUNKS": chunks, "TOKENS": side, "FIRST": number == 0}
        cuda.launch(
            kernels.assign, (-(-n // side), lines), x,
            x, weights, offset, seen, labels, changed, number, n, c, h, d, *x.stride()[:3],
            *_steps(seen), **tile, CLUSTERS=32, REAL=real is not None,
            stages=2 if d <= 128 else 1,
        )  # fmt: skip
        if iterations:
            cuda.launch(
                kernels.update, (-(-c // side) * chunks, lines, stretches), x,
                x, labels, sums, counts, changed, number, n, c, h, d, stretch, *x.stride()[:3],
                **tile, CLUSTERS=side,
            )  # fmt: skip
            finish(stretches)
    return centroids, labels.long()


def page_bounds(x: Tensor, page: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """The least and largest key of every page, as `ref.page_bounds`; real None: all tokens are."""
    b, h, n, d = x.shape
    x, pages = _channels_together(x), n // page
    low, high = (x.new_empty(b, h, pages, d) for _ in range(2))
    steps, given = (0, 0), x
    if real is not None:
        given = real.contiguous().view(torch.uint8)
        steps = _steps(given)
    room = cuda.room(page, 1)
    each = max(1, 4096 // (room * cuda.room(d)))
    if low.numel():
        cuda.launch(
            _kernels().bounds, (-(-pages // each), b * h), x,
            x, given, low, high, pages, page, h, d, float(torch.finfo(x.dtype).max),
            *x.stride()[:3], *steps,
            DB=cuda.room(d), PAGES=each, PAGE=room, REAL=real is not None,
        )  # fmt: skip
    return low, high


def page_scores(q: Tensor, low: Tensor, high: Tensor, group: str = "each") -> Tensor:
    """The most that q . k can be for a key of each page, as `ref.page_scores`."""
    if low.stride() != high.stride():
        low, high = low.contiguous(), high.contiguous()
    return together(_rate(q, low, high), low.shape[1], group)


def cluster_scores(q: Tensor, centroids: Tensor, alive: Tensor, group: str) -> Tensor:
    """How queries rate clusters, as `ref.cluster_scores`."""
    b, hk, c = alive.shape
    scores = dots(q, centroids).view(b, hk, -1, c).masked_fill_(~alive.unsqueeze(2), -torch.inf)
    return together(scores.view(b, -1, c), hk, group)


def dots(q: Tensor, k: Tensor) -> Tensor:
    """q [B, Hq, D] times each of k [B, Hk, N, D], fp32 [B, Hq, N], as `ref.dots`."""
    return _rate(q, k, None)


def select_clusters(scores: Tensor, size: Tensor, start: Tensor, order: Tensor, m: int) -> Tensor:
    """The tokens of the best clusters, int64 [B, H, m], as `ref.select_clusters`."""
    b, h, c = scores.shape
    hk, n = size.shape[1], order.shape[2]
    chosen = torch.empty(b, h, m, dtype=torch.int64, device=scores.device)
    size, start, order = (x.int().contiguous() for x in (size, start, order))
    if chosen.numel():
        cuda.launch(
            _kernels().choose, (c, b * h), scores,
            scores.contiguous(), size, start, order, chosen, c, n, m, hk, h // hk,
            CLUSTERS=256, TOKENS=128,
        )  # fmt: skip
    return chosen


def _rate(q: Tensor, low: Tensor, high: Tensor | None) -> Tensor:
    (b, hq, d), (hk, n) = q.shape, low.shape[1:3]
    if high is None:
        low = _channels_together(low)
    elif low.stride(3) != 1:
        low, high = low.contiguous(), high.contiguous()
    q = q if q.stride(2) == 1 else q.contiguous()
    scores = q.new_empty(b, hq, n, dtype=torch.float32)
    dk = min(cuda.room(d), 16 if q.dtype == torch.float32 else 128)
    if scores.numel():
        cuda.launch(
            _kernels().rate, (-(-n // 64), b * hk), q,
            q, low, low if high is None else high, scores, n, hk, hq // hk, d,
            *q.stride()[:2], *low.stride()[:3],
            DK=dk, CHUNKS=-(-d // dk), ROWS=cuda.room(hq // hk), KEYS=64, PAGES=high is not None,
        )  # fmt: skip
    return scores


def _channels_together(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _steps(mask: Tensor) -> tuple[int, int]:
    """From a row and a head [B, 1 or Hk, N] to the next."""
    return mask.stride(0), mask.stride(1) if mask.shape[1] > 1 else 0


@cache
def _kernels() -> Any:
    """The kernels; importing them imports Triton."""
    from . import gpu_index

    return gpu_index


def forms() -> Iterator[Form]:
    """What is compiled ahead of time; imports Triton."""

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    real = meta(1, 1, 4096, dtype=torch.bool)
    alive, seeds = meta(1, 1, 48, dtype=torch.bool), meta(1, 1, 48, dtype=torch.int64)
    call: Callable[[], object]
    for d in (64, 80, 128, 256):
        for dtype in cuda.DTYPES:
            name = f"d{d} {str(dtype).removeprefix('torch.')}"
            brief = d == 128 and dtype == torch.bfloat16
            x, q = meta(1, 2, 4096, d, dtype=dtype), meta(1, 8, d, dtype=dtype)
            for i, distance in enumerate(DISTANCES):
                call = partial(kmeans, x, seeds, real, alive, distance, 2 - (i > 0))
                yield from cuda.forms(f"{name} {distance}", call, brief and i == 1)
            yield from cuda.forms(name, partial(page_bounds, x, 16, real), brief)
            call = partial(page_scores, q, x, x)
            yield from cuda.forms(f"{name} pages", call, brief)
            yield from cuda.forms(f"{name} dots", partial(dots, q, x), False)
    call = partial(
        select_clusters, meta(1, 8, 48, dtype=torch.float32), meta(1, 2, 48), meta(1, 2, 48),
        meta(1, 2, 4096), 512,
    )  # fmt: skip
    yield from cuda.forms("clusters", call, True)
