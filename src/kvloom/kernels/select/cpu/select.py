"""Clusters and pages on CPU tensors by compiled kernels: which cases, and how they are called.

`find` rates and chooses, `assign` clusters. What is not covered is said in sentences, which
`dispatch` shows. Importing this does not import Numba, the first call does.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import dispatch
from .. import reference as ref

_NUMBERS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# Elements read that are worth a thread.
_WORTH = 1 << 18


def problems(x: Tensor) -> list[str]:
    """Why no kernel takes keys, centroids or bounds [B, Hk, N, D] like these."""
    found = []
    if x.shape[-1] % 16 or x.shape[-1] > 512:
        found.append(f"head_dim={x.shape[-1]} is not a multiple of 16, up to 512")
    if x.dtype not in _NUMBERS:
        found.append(f"they are {x.dtype}, not fp32, fp16 or bf16")
    if x.device.type != "cpu":
        found.append(f"the tensors are on {x.device.type}")
    return found


def kmeans(
    x: Tensor, start: Tensor, real: Tensor, alive: Tensor, distance: str, iterations: int
) -> tuple[Tensor, Tensor]:
    """As `ref.kmeans`."""
    return ref.kmeans(_flat(x), start, real, alive, distance, iterations, nearest, means)


def nearest(x: Tensor, centroids: Tensor, distance: str, alive: Tensor) -> Tensor:
    """As `ref.nearest`."""
    b, h, n, d = x.shape
    assign = _assign()
    weights, offset = ref.linear(centroids, distance, alive, x.dtype)
    panels = -(-weights.shape[2] // assign.PANEL)
    more = panels * assign.PANEL - weights.shape[2]
    offset = F.pad(offset, (0, more), value=-torch.inf)
    weights = F.pad(weights, (0, 0, 0, more)).view(b, h, panels, assign.PANEL, d)
    pairs = assign.takes_pairs(d, _NUMBERS[x.dtype])
    if pairs:  # two channels of a centroid beside each other
        weights = weights.to(x.dtype).unflatten(-1, (-1, 2)).transpose(3, 4).contiguous()
    else:
        weights = weights.transpose(-1, -2).contiguous()
    labels = torch.empty(b, h, n, dtype=torch.long)
    assign.nearest(d, _NUMBERS[x.dtype], pairs).run(
        (
            b * h, h, n, panels, weights.data_ptr(), offset.data_ptr(), labels.data_ptr(),
            *_place(x, 3),
        ),
        0,
        min(torch.get_num_threads(), 1 + x.numel() // _WORTH),
    )  # fmt: skip
    return labels


def means(x: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """As `ref.means`."""
    b, h, n, d = x.shape
    c = centroids.shape[2]
    total, labels = centroids.new_zeros(b, h, c, d), labels.contiguous()
    _assign().sums(d, _NUMBERS[x.dtype]).run(
        (b * h, h, n, c, total.data_ptr(), labels.data_ptr(), *_place(x, 3)),
        0,
        min(torch.get_num_threads(), 1 + x.numel() // _WORTH),
    )
    count = ref.sizes(labels, c).unsqueeze(-1)
    return torch.where(count > 0, total / count.clamp_min(1), centroids)


def cluster_scores(q: Tensor, centroids: Tensor, alive: Tensor, group: str) -> Tensor:
    """As `ref.cluster_scores`."""
    rows = _by_group(q, centroids.shape[1])
    rows = rows.mean(dim=2, keepdim=True) if group == "mean" else rows
    return _grouped(_rate(rows, None, centroids, None, alive), group)


def page_scores(q: Tensor, low: Tensor, high: Tensor, group: str) -> Tensor:
    """As `ref.page_scores`."""
    rows = _by_group(q, low.shape[1])
    above, below = rows.clamp_min(0), rows.clamp_max(0)
    if group == "mean":
        above, below = (x.mean(dim=2, keepdim=True) for x in (above, below))
    return _grouped(_rate(above, below, high, low, None), group)


def _by_group(q: Tensor, hk: int) -> Tensor:
    """q [B, Hq, D] in fp32, [B, Hk, R, D]."""
    return q.float().reshape(q.shape[0], hk, -1, q.shape[-1])


def _grouped(scores: Tensor, group: str) -> Tensor:
    """Scores [B, Hk, rows, C]: of the group (its mean is one row), or one behind the other."""
    return scores.amax(dim=2) if group == "max" else scores.flatten(1, 2)


def _rate(
    rows: Tensor, below: Tensor | None, high: Tensor, low: Tensor | None, alive: Tensor | None
) -> Tensor:
    """Products of rows [B, Hk, rows, D] and high, plus those of `below` and low: [.., rows, C]."""
    b, hk, r, d = rows.shape
    n = high.shape[2]
    out = rows.new_empty(b, hk, r, n)
    w = next(w for w in (4, 2, 1) if r % w == 0)
    kernel = _rating(d, w, high.dtype, low is not None)
    rows, below = rows.contiguous(), None if below is None else below.contiguous()
    high, low, alive = (_flat(x) for x in (high, low, alive))
    held = b * hk * n * d * (1 if low is None else 2)
    kernel.run(
        (
            b * hk, hk, r, n, rows.data_ptr(), 0 if below is None else below.data_ptr(),
            out.data_ptr(), *_place(high, 3), *_place(low, 3), *_place(alive, 2),
        ),
        0,
        min(torch.get_num_threads(), 1 + held // _WORTH),
    )  # fmt: skip
    return out


def select_clusters(scores: Tensor, size: Tensor, start: Tensor, order: Tensor, m: int) -> Tensor:
    """As `ref.select_clusters`; size, start, order: int32."""
    size, start, order = (x.int().contiguous() for x in (size, start, order))
    return _choose(scores, size.shape[1], m, 0, size, start, order)


def select_pages(scores: Tensor, pages: int, page: int) -> Tensor:
    """As `ref.select_pages`."""
    return _choose(scores, scores.shape[1], pages * page, page, None, None, None)


def _choose(scores: Tensor, hk: int, m: int, page: int, *held: Tensor | None) -> Tensor:
    b, h, n = scores.shape
    slots = torch.empty(b, h, m, dtype=torch.long)
    scores = scores.contiguous()
    where = [0 if x is None else x.data_ptr() for x in held]
    tokens = 0 if held[-1] is None else held[-1].shape[2]
    _choosing().run(
        (b * h, h // hk, n, m, page, scores.data_ptr(), slots.data_ptr(), *where, tokens),
        0,
        min(torch.get_num_threads(), 1 + 64 * b * h * n // _WORTH),
    )
    return slots


def page_bounds(x: Tensor, page: int, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `ref.page_bounds`."""
    b, h, n, d = x.shape
    low, high = torch.empty(2, b, h, n // page, d).unbind(0)
    most, x = torch.finfo(x.dtype).max, _flat(x)
    real = None if real is None else real[:, 0].contiguous()
    kernel, bits = _bounding(d, x.dtype)
    kernel.run(
        (
            b * h, h, n // page, page, bits(most), low.data_ptr(), high.data_ptr(),
            *_place(x, 3), *_place(real, 1),
        ),
        0,
        min(torch.get_num_threads(), 1 + x.numel() // _WORTH),
    )  # fmt: skip
    return low.to(x.dtype), high.to(x.dtype)  # exact: each is a number of x


def _flat(x: Any) -> Any:
    """x with its last dimension side by side."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _place(x: Tensor | None, dims: int) -> tuple[int, ...]:
    """A tensor's address and the bytes from one element to the next along its first `dims`."""
    if x is None:
        return (0,) * (dims + 1)
    size = x.element_size()
    return (x.data_ptr(), *(step * size for step in x.stride()[:dims]))


def _loaded() -> Any:
    with dispatch.loading():
        from ... import cpu_runtime as team
        from . import select_kernel as find
    return find, team


@cache
def _assign() -> Any:
    _loaded()
    from . import kmeans_kernel as assign

    return assign


@cache
def _rating(d: int, w: int, dtype: torch.dtype, bounds: bool) -> Any:
    find, _ = _loaded()
    return find.rating(find.Form(d, w, _NUMBERS[dtype], bounds))


@cache
def _choosing() -> Any:
    return _loaded()[0].choosing()


@cache
def _bounding(d: int, dtype: torch.dtype) -> Any:
    find, team = _loaded()
    return find.bounding(d, _NUMBERS[dtype]), team.bits
