"""Clusters and pages of keys, and the tokens a step reads of them, in plain torch.

Decides the arithmetic; when keys are indexed and how many tokens are read is decided elsewhere.
Everything is computed in fp32, for all batch rows and key/value heads at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..quantize import reference as quant

DISTANCES = ("cosine", "l2", "inner")
# Similarities of one block of tokens hold at most this many numbers (64 MiB in fp32).
_BLOCK_NUMEL = 1 << 24


def seeds(nonpadding: Tensor, count: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """Return tokens that centroids start from: int64 [B, 1, most], the first count[b] distinct.

    nonpadding: bool [B, 1, N]. count: int64 [B, 1]. Seed j of a row is drawn from the j-th of
    `count` equal stretches of its tokens without padding, so that it depends on nothing but them.
    """
    order = (~nonpadding).to(torch.uint8).argsort(dim=-1, stable=True)  # padding last
    tokens = nonpadding.sum(dim=-1, keepdim=True).double()  # [B, 1, 1]
    drawn = torch.rand(most, generator=generator, dtype=torch.float64, device=generator.device).to(
        nonpadding.device
    )
    place = torch.arange(most, device=nonpadding.device) + drawn
    rank = (place * tokens / count.clamp_min(1).unsqueeze(-1)).long()
    return order.gather(2, rank.clamp(max=nonpadding.shape[-1] - 1))


def linear(
    centroids: Tensor, distance: str, alive: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return weights fp32 [B, Hk, C, D] and offsets [B, Hk, C]: the nearest has the most x w + o.

    Weights are rounded to the keys' dtype, as centroids are in the end.
    """
    weights = centroids
    if distance == "cosine":  # the key's own length does not change the order
        weights = centroids / centroids.norm(dim=-1, keepdim=True).clamp_min(1e-20)
    weights = weights.to(dtype).float()
    offset = torch.zeros_like(centroids[..., 0])
    if distance == "l2":  # |x - c|^2 = |x|^2 - 2 (x c - |c|^2 / 2)
        offset = -0.5 * weights.square().sum(dim=-1)
    return weights, offset.masked_fill(~alive, -torch.inf)


def nearest(x: Tensor, centroids: Tensor, distance: str, alive: Tensor) -> Tensor:
    """Return the living centroid nearest to each key: int64 [B, Hk, N].

    x: [B, Hk, N, D]. centroids: fp32 [B, Hk, C, D]. alive: bool [B, 1 or Hk, C]. Cosine and inner
    product: the largest; l2: the smallest.
    """
    b, h, n, _ = x.shape
    weights, offset = linear(centroids, distance, alive, x.dtype)
    weights, offset = weights.transpose(-1, -2), offset.unsqueeze(2)
    labels = torch.empty(b, h, n, dtype=torch.long, device=x.device)
    step = max(1, _BLOCK_NUMEL // max(1, b * h * centroids.shape[2]))
    for lo in range(0, n, step):
        part = slice(lo, lo + step)
        labels[:, :, part] = (x[:, :, part].float() @ weights).add_(offset).argmax(dim=-1)
    return labels


def means(x: Tensor, labels: Tensor, centroids: Tensor) -> Tensor:
    """Return the mean of the keys x [B, Hk, N, D] of every label below C: fp32 [B, Hk, C, D].

    labels: int64 [B, Hk, N]. centroids: fp32 [B, Hk, C, D], for those without keys.
    """
    b, h, c, d = centroids.shape
    part = torch.arange(b * h, device=x.device).view(b, h, 1) * (c + 1)
    total = torch.zeros(b * h * (c + 1), d, dtype=torch.float32, device=x.device)
    total.index_add_(0, (labels + part).view(-1), x.reshape(-1, d).float())
    total = total.view(b, h, c + 1, d)[:, :, :c]
    count = sizes(labels, c).unsqueeze(-1)
    return torch.where(count > 0, total / count.clamp_min(1), centroids)


def kmeans(
    x: Tensor, start: Tensor, nonpadding: Tensor, alive: Tensor, distance: str, iterations: int
) -> tuple[Tensor, Tensor]:
    """Cluster keys x [B, Hk, N, D]: centroids fp32 [B, Hk, C, D] and labels int64 [B, Hk, N].

    start: int64 [B, 1, C], the keys that centroids start from. nonpadding: bool [B, 1, N], False
    for tokens that take no part; their label is C. alive: bool [B, 1, C]. A centroid is the mean of
    its keys as they are; a cluster without keys keeps its centroid. Stops when no label changes.
    """
    return lloyd(x, start, nonpadding, alive, distance, iterations, nearest, means)


def lloyd(
    x: Tensor,
    start: Tensor,
    nonpadding: Tensor,
    alive: Tensor,
    distance: str,
    iterations: int,
    nearest: Callable[[Tensor, Tensor, str, Tensor], Tensor],
    means: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Run `kmeans` by functions that do a step's work."""
    b, h, n, d = x.shape
    c = start.shape[-1]
    centroids = x.gather(2, start.unsqueeze(-1).expand(b, h, c, d)).float()
    labels = x.new_full((b, h, n), -1, dtype=torch.long)
    for _ in range(iterations):
        now = nearest(x, centroids, distance, alive).masked_fill_(~nonpadding, c)
        if torch.equal(now, labels):
            break
        labels = now
        centroids = means(x, labels, centroids)
    return centroids, labels


def sizes(labels: Tensor, clusters: int) -> Tensor:
    """Count the tokens with each of the labels 0..clusters - 1: int64 [B, Hk, clusters]."""
    b, h, _ = labels.shape
    count = torch.zeros(b, h, clusters + 1, dtype=torch.long, device=labels.device)
    return count.scatter_add_(2, labels, torch.ones_like(labels))[..., :clusters]


def cluster_scores(q: Tensor, centroids: Tensor, alive: Tensor, query_heads: str) -> Tensor:
    """Return the scores q . centroid of queries [B, Hq, D]: fp32 [B, Hk, C].

    "each": [B, Hq, C]; "turns": [B, Hk, R, C]. centroids: [B, Hk, C, D]. alive: bool [B, Hk, C];
    the scores of other clusters are minus infinity.
    """
    b, hk, c = alive.shape
    dead = ~alive.unsqueeze(2).expand(b, hk, q.shape[1] // hk, c).reshape(b, -1, c)
    scores = dots(q, centroids).masked_fill_(dead, -torch.inf)
    if query_heads == "turns":
        return scores.view(b, hk, -1, c)
    return reduce_query_heads(scores, hk, query_heads)


def reduce_query_heads(scores: Tensor, kv_heads: int, query_heads: str) -> Tensor:
    """Return the scores of the heads that choose: [B, Hk, N], or `scores` for "each".

    Args:
        scores: fp32 [B, Hq, N], of each query head.
        kv_heads: Hk.
        query_heads: How those of a key/value head choose together, as in `Recall`.
    """
    if query_heads == "each":
        return scores
    by_group = scores.view(scores.shape[0], kv_heads, -1, scores.shape[-1])
    if query_heads == "turns":
        return by_turns(by_group)
    return by_group.amax(dim=2) if query_heads == "max" else by_group.mean(dim=2)


def by_turns(scores: Tensor) -> Tensor:
    """Return one score for the R query heads of a group that take turns: fp32 [B, Hk, N].

    scores: [B, Hk, R, N]. In turn t of a round, head t takes the best of its scores that it has not
    taken; of equal scores the first. What is taken earlier by any head has the larger result.
    """
    r = scores.shape[2]
    best = scores.argsort(dim=-1, descending=True, stable=True)
    rounds = best.argsort(dim=-1)
    turn = rounds * r + torch.arange(r, device=scores.device).unsqueeze(-1)
    return -turn.amin(dim=2).float()


def select_clusters(scores: Tensor, size: Tensor, start: Tensor, order: Tensor, m: int) -> Tensor:
    """Return the tokens of the best clusters, exactly m of them: int64 [B, H, m].

    scores: fp32 [B, H, C]. size, start: [B, Hk, C], where each cluster's tokens lie in order
    [B, Hk, N], every token once. H is a multiple of Hk: heads of a group choose alone. Clusters are
    taken best first; of the last, the oldest tokens that still fit. scores of [B, Hk, R, C]: see
    `by_turns`, H is Hk.
    """
    scores = by_turns(scores) if scores.dim() == 4 else scores
    b, h, _ = scores.shape
    r = h // size.shape[1]
    best = scores.argsort(dim=-1, descending=True, stable=True)
    size, start = (_by_group(x, best, r) for x in (size.long(), start.long()))
    end = size.cumsum(dim=-1)
    place = torch.arange(m, device=scores.device).expand(b, h, m).contiguous()
    rank = torch.searchsorted(end, place, right=True)  # passes over empty clusters
    return _by_group(order, (start - end + size).gather(2, rank) + place, r).long()


def page_bounds(x: Tensor, page: int, nonpadding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the least and largest key of each page and channel: 2 x [B, Hk, N / page, D].

    x: [B, Hk, N, D], whole pages. nonpadding: bool [B, 1, N], False for tokens that do not count
    (None: all do); a page without tokens has the bounds (plus, minus) the largest number there is.
    """
    b, h, n, d = x.shape
    pages = x.reshape(b, h, n // page, page, d)
    if nonpadding is None:
        return pages.amin(dim=3), pages.amax(dim=3)
    hidden = ~nonpadding.view(b, 1, n // page, page, 1)
    most = torch.finfo(x.dtype).max
    low = pages.masked_fill(hidden, most).amin(dim=3)
    return low, pages.masked_fill(hidden, -most).amax(dim=3)


def page_scores(q: Tensor, low: Tensor, high: Tensor, query_heads: str) -> Tensor:
    """Return the most that q . k can be for a key of each page; -inf for no tokens.

    q: [B, Hq, D]. low, high: [B, Hk, pages, D]. Returns fp32 [B, Hk, pages], of the heads that
    choose together; "each": [B, Hq, pages]; "turns": [B, Hk, R, pages]. The sum
    of max(q low, q high) over channels is relu(q) high - relu(-q) low.
    """
    b, hq, d = q.shape
    rows = q.float().view(b, low.shape[1], -1, d)
    top = rows.clamp_min(0) @ high.float().transpose(-1, -2)
    top -= (-rows).clamp_min(0) @ low.float().transpose(-1, -2)
    is_empty = (low[..., 0] > high[..., 0]).unsqueeze(2)
    scores = top.masked_fill_(is_empty, -torch.inf)
    if query_heads == "turns":
        return scores
    return reduce_query_heads(scores.view(b, hq, -1), low.shape[1], query_heads)


def select_pages(scores: Tensor, pages: int, page: int) -> Tensor:
    """Return every token of the best pages, best first, of equal ones the oldest.

    Args:
        scores: fp32 [B, H, P], or [B, H, R, P] where query heads take turns.
        pages: How many pages; all P if there are no more.
        page: Tokens of a page.

    Returns:
        Slots int64 [B, H, min(pages, P) * page].
    """
    scores = by_turns(scores) if scores.dim() == 4 else scores
    best = scores.argsort(dim=-1, descending=True, stable=True)[..., :pages]
    return (best.unsqueeze(-1) * page + torch.arange(page, device=best.device)).flatten(2)


def dots(q: Tensor, k: Tensor) -> Tensor:
    """Return q [B, Hq, D] times each of k [B, Hk, N, D]: fp32 [B, Hq, N].

    Args:
        q: Queries.
        k: Keys, or what stands for them.
    """
    b, hq, d = q.shape
    rows = q.float().view(b, k.shape[1], -1, d)
    return (rows @ k.float().transpose(-1, -2)).view(b, hq, -1)


def gather(x: Tensor, slots: Tensor) -> Tensor:
    """Gather x [B, Hk, N, D] at slots int64 [B, H, M], H a multiple of Hk: [B, H, M, D]."""
    b, h, m = slots.shape
    _, hk, n, d = x.shape
    if x.is_cuda and h == hk:  # one launch
        return x.gather(2, slots[..., None].expand(b, h, m, d))
    row, head, token, channel = x.stride()
    if channel != 1 or token != d or row % d or head % d:
        x, row, head = x.contiguous(), hk * n * d, n * d
    # On a CPU, copying whole tokens out of flat storage is many times faster than torch.gather,
    # which copies channel by channel.
    flat = x.as_strided((((b - 1) * row + (hk - 1) * head) // d + n, d), (d, 1))
    begin = torch.arange(b, device=x.device)[:, None] * (row // d)
    begin = begin + torch.arange(hk, device=x.device) * (head // d)
    places = slots.reshape(b, hk, -1) + begin.unsqueeze(-1)
    return flat.index_select(0, places.flatten()).view(b, h, m, d)


def gather_packed(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor,
    bits: float,
    axis: str,
    group: int,
    slots: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Unpack the tokens at slots int64 [B, H, M] and no others: [B, H, M, D].

    codes, scale, zero: as `kernels.quantize.reference` packs them.
    """
    b, h, m = slots.shape
    hk, d = codes.shape[1], codes.shape[-1]
    slots = slots.reshape(b, hk, -1)
    per_block, rows = quant.PACK_BLOCK[bits]
    first = (slots // per_block * rows).unsqueeze(-1) + torch.arange(rows, device=slots.device)
    by_block = quant.unpack_codes(
        gather(codes, first.flatten(2)), bits, slots.shape[-1] * per_block
    )
    by_block = by_block.view(b, hk, -1, per_block, d)
    in_block = (slots % per_block)[..., None, None].expand(-1, -1, -1, 1, d)
    chosen = by_block.gather(3, in_block).squeeze(3).float()
    meta = slots // group if axis == "channel" else slots
    scale, zero = (_gather_numbers(x, meta) for x in (scale, zero))
    if axis == "token":
        scale, zero = (x.repeat_interleave(group, dim=-1) for x in (scale, zero))
    return torch.addcmul(zero, chosen, scale).to(dtype).view(b, h, m, d)


def _gather_numbers(x: Tensor, slots: Tensor) -> Tensor:
    """Gather scales or zeros in fp32, as `gather` does; those of 8 bit as bytes."""
    if x.dtype.itemsize == 1:
        return gather(x.view(torch.uint8), slots).view(x.dtype).float()
    return gather(x, slots).float()


def _by_group(x: Tensor, index: Tensor, r: int) -> Tensor:
    """Gather x [B, Hk, N] at int64 [B, Hk * r, M]: [B, Hk * r, M]."""
    b, h, m = index.shape
    return x.gather(2, index.reshape(b, h // r, -1)).view(b, h, m)
