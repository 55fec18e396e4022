"""Clusters and pages on CPU tensors: which cases the compiled kernels cover, and their calls.

Importing this does not import Numba; the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import dispatch
from ..arguments import DTYPE_CODES, address, contiguous_rows, strides
from ..limits import Coverage, dtype_problem, head_dim_problem
from . import reference as ref
from .arguments import BOUND, NEAREST, SCORE, SELECT, SUM

_NUMBERS_PER_THREAD = 1 << 18
COVERAGE = Coverage(
    ("`head_dim` a multiple of 16, up to 512", lambda x: head_dim_problem(x.shape[-1])),
    ("fp32, fp16, bf16", lambda x: dtype_problem(x.dtype, "they are")),
)


def kmeans(
    x: Tensor, start: Tensor, nonpadding: Tensor, alive: Tensor, distance: str, iterations: int
) -> tuple[Tensor, Tensor]:
    """Cluster as `reference.kmeans` does."""
    return ref.lloyd(_flat(x), start, nonpadding, alive, distance, iterations, nearest, means)


def nearest(x: Tensor, centroids: Tensor, distance: str, alive: Tensor) -> Tensor:
    """Find what `reference.nearest` finds."""
    b, h, n, d = x.shape
    panel = kernels().PANEL
    weights, offset = ref.linear(centroids, distance, alive, x.dtype)
    panels = -(-weights.shape[2] // panel)
    missing = panels * panel - weights.shape[2]
    offset = F.pad(offset, (0, missing), value=-torch.inf)
    weights = F.pad(weights, (0, 0, 0, missing)).view(b, h, panels, panel, d)
    kernel, _, pairs = compiled_kmeans(d, x.dtype)
    if pairs:  # two channels of a centroid beside each other
        weights = weights.to(x.dtype).unflatten(-1, (-1, 2)).transpose(3, 4).contiguous()
    else:
        weights = weights.transpose(-1, -2).contiguous()
    labels = torch.empty(b, h, n, dtype=torch.long, device="cpu")
    packed = NEAREST.pack(
        heads=b * h, kv_heads=h, tokens=n, panels=panels, weights=weights.data_ptr(),
        offsets=offset.data_ptr(), labels=labels.data_ptr(), x=strides(x, 3),
    )  # fmt: skip
    kernel.run(packed, 0, _threads(x.numel()))
    return labels


def means(x: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Average as `reference.means` does."""
    b, h, n, d = x.shape
    c = centroids.shape[2]
    total, labels = centroids.new_zeros(b, h, c, d), labels.contiguous()
    packed = SUM.pack(
        heads=b * h, kv_heads=h, tokens=n, clusters=c, sums=total.data_ptr(),
        labels=labels.data_ptr(), x=strides(x, 3),
    )  # fmt: skip
    compiled_kmeans(d, x.dtype)[1].run(packed, 0, _threads(x.numel()))
    count = ref.sizes(labels, c).unsqueeze(-1)
    return torch.where(count > 0, total / count.clamp_min(1), centroids)


def cluster_scores(q: Tensor, centroids: Tensor, alive: Tensor, query_heads: str) -> Tensor:
    """Score as `reference.cluster_scores` does."""
    rows = _by_group(q, centroids.shape[1])
    rows = rows.mean(dim=2, keepdim=True) if query_heads == "mean" else rows
    return _grouped(_score(rows, None, centroids, None, alive), query_heads)


def page_scores(q: Tensor, low: Tensor, high: Tensor, query_heads: str) -> Tensor:
    """Score as `reference.page_scores` does."""
    rows = _by_group(q, low.shape[1])
    above, below = rows.clamp_min(0), rows.clamp_max(0)
    if query_heads == "mean":
        above, below = (x.mean(dim=2, keepdim=True) for x in (above, below))
    return _grouped(_score(above, below, high, low, None), query_heads)


def _by_group(q: Tensor, hk: int) -> Tensor:
    """Return q [B, Hq, D] by key/value head, fp32 [B, Hk, R, D]."""
    return q.float().reshape(q.shape[0], hk, -1, q.shape[-1])


def _grouped(scores: Tensor, query_heads: str) -> Tensor:
    """Return the scores [B, Hk, rows, C] as `reference.cluster_scores` does; the mean is a row."""
    if query_heads == "turns":
        return scores
    return scores.amax(dim=2) if query_heads == "max" else scores.flatten(1, 2)


def _score(
    rows: Tensor, below: Tensor | None, high: Tensor, low: Tensor | None, alive: Tensor | None
) -> Tensor:
    """Multiply rows [B, Hk, rows, D] by high, and add those of `below` by low: [.., rows, C]."""
    b, hk, r, d = rows.shape
    n = high.shape[2]
    out = rows.new_empty(b, hk, r, n)
    kernel = scoring(r, high, low is not None)
    rows, below = rows.contiguous(), None if below is None else below.contiguous()
    high, low, alive = _flat(high), _flat(low), _flat(alive)
    packed = SCORE.pack(
        heads=b * hk, kv_heads=hk, rows=r, count=n, q=rows.data_ptr(), q_low=address(below),
        scores=out.data_ptr(), high=strides(high, 3), low=strides(low, 3),
        alive=strides(alive, 2),
    )  # fmt: skip
    kernel.run(packed, 0, _threads(b * hk * n * d * (1 if low is None else 2)))
    return out


def select_clusters(scores: Tensor, size: Tensor, start: Tensor, order: Tensor, m: int) -> Tensor:
    """Select as `reference.select_clusters` does; size, start, order: int32."""
    size, start, order = (x.int().contiguous() for x in (size, start, order))
    return _select(scores, size.shape[1], m, 0, size, start, order)


def select_pages(scores: Tensor, pages: int, page: int) -> Tensor:
    """Select as `reference.select_pages` does."""
    pages = min(pages, scores.shape[-1])
    return _select(scores, scores.shape[1], pages * page, page, None, None, None)


def _select(
    scores: Tensor,
    hk: int,
    budget: int,
    page: int,
    size: Tensor | None,
    start: Tensor | None,
    order: Tensor | None,
) -> Tensor:
    turns = scores.shape[2] if scores.dim() == 4 else 1
    b, h, n = scores.shape[0], scores.shape[1], scores.shape[-1]
    slots = torch.empty(b, h, budget, dtype=torch.long, device="cpu")
    scores = scores.contiguous()
    packed = SELECT.pack(
        heads=b * h, heads_per_kv=h // hk, turns=turns, count=n, budget=budget, page=page,
        scores=scores.data_ptr(), slots=slots.data_ptr(), size=address(size),
        start=address(start), order=address(order), tokens=0 if order is None else order.shape[2],
    )  # fmt: skip
    selecting().run(packed, 0, _threads(64 * b * h * turns * n))
    return slots


def page_bounds(x: Tensor, page: int, nonpadding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Find bounds as `reference.page_bounds` does."""
    b, h, n, d = x.shape
    low, high = torch.empty(2, b, h, n // page, d, dtype=torch.float32, device="cpu").unbind(0)
    x = _flat(x)
    if nonpadding is not None:
        nonpadding = None if bool(nonpadding.all()) else nonpadding[:, 0].contiguous()
    packed = BOUND.pack(
        heads=b * h, kv_heads=h, pages=n // page, page=page, largest=torch.finfo(x.dtype).max,
        low=low.data_ptr(), high=high.data_ptr(), x=strides(x, 3),
        nonpadding=strides(nonpadding, 1),
    )  # fmt: skip
    bounding(x).run(packed, 0, _threads(x.numel()))
    return low.to(x.dtype), high.to(x.dtype)  # exact: each is a number of x


def _threads(numbers: int) -> int:
    """Return how many threads are worth reading so many numbers."""
    return min(torch.get_num_threads(), 1 + numbers // _NUMBERS_PER_THREAD)


def _flat(x: Any) -> Any:
    """Return x with contiguous channels."""
    return None if x is None else contiguous_rows(x)


@cache
def compiled_kmeans(d: int, dtype: torch.dtype) -> tuple[Any, Any, bool]:
    """Compile the kernels of `nearest` and `means`; True: keys are multiplied in pairs."""
    module, dtype_code = kernels(), DTYPE_CODES[dtype]
    pairs = module.takes_pairs(d, dtype_code)
    return module.nearest(d, dtype_code, pairs), module.sums(d, dtype_code), pairs


@cache
def kernels() -> Any:
    """Import the kernels, which are compiled by head size and dtype."""
    with dispatch.loading():
        from . import cpu_kernel
    return cpu_kernel


def scoring(rows: int, high: Tensor, bounds: bool) -> Any:
    """Compile the kernel that multiplies rows of queries by centroids or bounds [B, Hk, C, D]."""
    w = next(w for w in (4, 2, 1) if rows % w == 0)
    variant = kernels().SelectVariant(high.shape[3], w, DTYPE_CODES[high.dtype], bounds)
    return kernels().scoring(variant)


def selecting() -> Any:
    """Compile the kernel that selects by scores."""
    return kernels().selecting()


def bounding(x: Tensor, *_: Any) -> Any:
    """Compile the kernel of `page_bounds` for keys x."""
    return kernels().bounding(x.shape[3], DTYPE_CODES[x.dtype])


def scoring_clusters(q: Tensor, centroids: Tensor, _: Tensor, query_heads: str) -> Any:
    """Compile the kernel of `cluster_scores` for these arguments."""
    return scoring(_rows(q, centroids, query_heads), centroids, False)


def scoring_pages(q: Tensor, low: Tensor, _: Tensor, query_heads: str) -> Any:
    """Compile the kernel of `page_scores` for these arguments."""
    return scoring(_rows(q, low, query_heads), low, True)


def clustering(x: Tensor, *_: Any) -> Any:
    """Compile the kernels of `kmeans` for keys x."""
    return compiled_kmeans(x.shape[3], x.dtype)


def _rows(q: Tensor, keys: Tensor, query_heads: str) -> int:
    return 1 if query_heads == "mean" else q.shape[1] // keys.shape[1]
