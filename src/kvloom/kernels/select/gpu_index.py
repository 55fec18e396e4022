"""Triton: K-means over keys, bounds of pages, and what a step's queries choose.

`assign` labels tokens: a program owns TOKENS keys and walks the centroids as `ref.linear` weighs
them, in the keys' dtype (`finish` makes these). `update` sums a cluster's keys: a program owns
CLUSTERS clusters, a stretch of tokens and of channels, and multiplies keys by zeros and ones, so
that sums have one order and no atomics; `finish` adds the stretches. An iteration in which no label
changes leaves a flag, at which later ones return at once: the host never waits.

`choose` replaces a sort: the place of a cluster's tokens is the size of all better clusters.
Reference: `ref`. Labels and choices are its own, but where fp32 cannot tell two numbers apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What changes from step to step is no reason to compile again.
_VARY = ["number", "n", "m", "pages", "clusters", "stretch", "real_row", "real_head"]


@triton.jit(do_not_specialize=_VARY)
def assign(
    x, weights, offset, real, labels, changed, number, n, clusters, heads, D,
    x_row, x_head, x_token, real_row, real_head,
    DK: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr,
    CLUSTERS: tl.constexpr, FIRST: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Labels int32 [B, Hk, N] of TOKENS keys. Grid: (blocks of tokens, batch row and head).

    A key takes the cluster with the largest x . weights + offset. weights: [B, Hk, C, D]; offset:
    fp32 [B, Hk, C]. FIRST: there are no labels yet. changed: int32, one an iteration, above 0 if a
    label changed in it; number: of this iteration.
    """
    if not FIRST and tl.load(changed + number - 1) == 0:
        return
    line = tl.program_id(1).to(tl.int64)
    row, head = line // heads, line % heads
    i = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    x += row * x_row + head * x_head
    best = tl.full([TOKENS], float("-inf"), tl.float32)
    label = tl.zeros([TOKENS], tl.int32)
    for lo in range(0, clusters, CLUSTERS):
        j = lo + tl.arange(0, CLUSTERS)
        s = tl.zeros([TOKENS, CLUSTERS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            channel = chunk * DK + tl.arange(0, DK)
            inside = channel < D
            at = i.to(tl.int64)[:, None] * x_token + channel[None, :]
            keys = tl.load(x + at, mask=(i < n)[:, None] & inside[None, :], other=0.0)
            mask = (j < clusters)[None, :] & inside[:, None]
            place = (line * clusters + j) * D
            means = tl.load(weights + place[None, :] + channel[:, None], mask=mask, other=0.0)
            s = tl.dot(keys, means, s, input_precision="ieee")
        place = line * clusters + j
        s += tl.load(offset + place, mask=j < clusters, other=float("-inf"))[None, :]
        top, where = tl.max(s, axis=1, return_indices=True)
        label = tl.where(top > best, lo + where, label)
        best = tl.maximum(best, top)
    if REAL:
        real_at = real + row * real_row + head * real_head
        label = tl.where(tl.load(real_at + i, mask=i < n, other=1) != 0, label, clusters)
    if not FIRST:
        old = tl.load(labels + line * n + i, mask=i < n, other=0)
        tl.atomic_max(changed + number, tl.max(((old != label) & (i < n)).to(tl.int32), axis=0))
    tl.store(labels + line * n + i, label, mask=i < n)


@triton.jit(do_not_specialize=_VARY)
def update(
    x, labels, sums, counts, changed, number, n, clusters, heads, D, stretch,
    x_row, x_head, x_token,
    DK: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, CLUSTERS: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Sums and counts of CLUSTERS clusters over a stretch of tokens, a multiple of TOKENS.

    sums: fp32 [stretches, B, Hk, C, D]; counts: fp32 [stretches, B, Hk, C]. Grid: (blocks of
    clusters by chunks of DK channels, batch row and head, stretches).
    """
    if not FIRST and tl.load(changed + number) == 0:
        return
    line, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row, head = line // heads, line % heads
    j = tl.program_id(0) // CHUNKS * CLUSTERS + tl.arange(0, CLUSTERS)
    channel = tl.program_id(0) % CHUNKS * DK + tl.arange(0, DK)
    inside = channel < D
    x += row * x_row + head * x_head
    total = tl.zeros([CLUSTERS, DK], tl.float32)
    count = tl.zeros([CLUSTERS], tl.float32)
    for lo in range(part * stretch, tl.minimum(n, (part + 1) * stretch), TOKENS):
        i = lo + tl.arange(0, TOKENS)
        label = tl.load(labels + line * n + i, mask=i < n, other=-1)
        place = i.to(tl.int64)[:, None] * x_token + channel[None, :]
        keys = tl.load(x + place, mask=(i < n)[:, None] & inside[None, :], other=0.0)
        mine = label[None, :] == j[:, None]
        total = tl.dot(mine.to(keys.dtype), keys, total, input_precision="ieee")
        count += tl.sum(mine.to(tl.float32), axis=1)
    at = (part * tl.num_programs(1) + line) * clusters + j
    mask = (j < clusters)[:, None] & inside[None, :]
    tl.store(sums + at[:, None] * D + channel[None, :], total, mask=mask)
    tl.store(counts + at, count, mask=(j < clusters) & (tl.program_id(0) % CHUNKS == 0))


@triton.jit(do_not_specialize=_VARY)
def finish(
    centroids, weights, offset, alive, sums, counts, clusters, heads, D, stretches,
    alive_row, alive_head,
    DB: tl.constexpr, CLUSTERS: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Centroids fp32 [B, Hk, C, D] from sums, and what `assign` takes of them.

    One without keys stays as it is: all of them if there are no stretches yet. DISTANCE: 0 cosine,
    1 l2, 2 inner product. Grid: (blocks of clusters, batch row and head).
    """
    line = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * CLUSTERS + tl.arange(0, CLUSTERS)
    channel = tl.arange(0, DB)
    known = j < clusters
    mask = known[:, None] & (channel < D)[None, :]
    place = (line * clusters + j)[:, None] * D + channel[None, :]
    mean = tl.load(centroids + place, mask=mask, other=0.0)
    total = tl.zeros([CLUSTERS, DB], tl.float32)
    count = tl.zeros([CLUSTERS], tl.float32)
    for part in range(stretches):
        at = (part * tl.num_programs(1) + line) * clusters + j
        total += tl.load(sums + at[:, None] * D + channel[None, :], mask=mask, other=0.0)
        count += tl.load(counts + at, mask=known, other=0.0)
    mean = tl.where((count > 0)[:, None], total / tl.maximum(count, 1.0)[:, None], mean)
    tl.store(centroids + place, mean, mask=mask)
    if DISTANCE == 0:
        mean /= tl.maximum(tl.sqrt(tl.sum(mean * mean, axis=1)), 1e-20)[:, None]
    weight = mean.to(weights.dtype.element_ty)
    tl.store(weights + place, weight, mask=mask)
    plus = tl.zeros([CLUSTERS], tl.float32)
    if DISTANCE == 1:
        plus = -0.5 * tl.sum(weight.to(tl.float32) * weight.to(tl.float32), axis=1)
    lives = alive + line // heads * alive_row + line % heads * alive_head
    plus = tl.where(tl.load(lives + j, mask=known, other=0) != 0, plus, float("-inf"))
    tl.store(offset + line * clusters + j, plus, mask=known)


@triton.jit(do_not_specialize=_VARY)
def bounds(
    x, real, low, high, pages, page, heads, D, most, x_row, x_head, x_token, real_row, real_head,
    DB: tl.constexpr, PAGES: tl.constexpr, PAGE: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """The least and largest key of PAGES pages and every channel, [B, Hk, pages, D].

    Grid: (blocks of pages, batch row and head). A page without tokens has (most, -most).
    """
    line = tl.program_id(1).to(tl.int64)
    row, head = line // heads, line % heads
    number = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    within = tl.arange(0, PAGE)
    channel = tl.arange(0, DB)
    inside = channel < D
    i = number[:, None] * page + within[None, :]
    there = (number < pages)[:, None] & (within < page)[None, :]
    at = row * x_row + head * x_head + i.to(tl.int64)[:, :, None] * x_token + channel[None, None, :]
    mask = there[:, :, None] & inside[None, None, :]
    keys = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if REAL:
        seen = tl.load(real + row * real_row + head * real_head + i, mask=there, other=0)
        mask = mask & (seen != 0)[:, :, None]
    least = tl.min(tl.where(mask, keys, most), axis=1)
    largest = tl.max(tl.where(mask, keys, -most), axis=1)
    place = (line * pages + number)[:, None] * D + channel[None, :]
    mask = (number < pages)[:, None] & inside[None, :]
    tl.store(low + place, least.to(low.dtype.element_ty), mask=mask)
    tl.store(high + place, largest.to(high.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARY)
def rate(
    q, low, high, scores, n, heads, r, D, q_row, q_head, x_row, x_head, x_token,
    DK: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGES: tl.constexpr,
):  # fmt: skip
    """How the R queries of a group rate KEYS vectors: fp32 scores [B, Hq, N].

    PAGES: the most that q k can be for low <= k <= high, -inf where low > high in the first
    channel. Else q times `low`. Grid: (blocks of vectors, batch row and key/value head).
    """
    line = tl.program_id(1).to(tl.int64)
    row, head = line // heads, line % heads
    number = tl.arange(0, ROWS)
    j = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    first = row * x_row + head * x_head + j.to(tl.int64) * x_token
    mask = j < n
    if PAGES:
        bottom = tl.load(low + first, mask=mask, other=0.0).to(tl.float32)
        mask = mask & (bottom <= tl.load(high + first, mask=mask, other=0.0).to(tl.float32))
    s = tl.zeros([ROWS, KEYS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        channel = chunk * DK + tl.arange(0, DK)
        inside = channel < D
        at = row * q_row + (head * r + number)[:, None] * q_head + channel[None, :]
        queries = tl.load(q + at, mask=(number < r)[:, None] & inside[None, :], other=0.0)
        place = first[None, :] + channel[:, None]
        least = tl.load(low + place, mask=mask[None, :] & inside[:, None], other=0.0)
        if PAGES:
            largest = tl.load(high + place, mask=mask[None, :] & inside[:, None], other=0.0)
            none = tl.zeros([ROWS, DK], queries.dtype)
            above = tl.maximum(queries, none).to(queries.dtype)
            below = tl.minimum(queries, none).to(queries.dtype)
            s = tl.dot(above, largest, s, input_precision="ieee")
            s = tl.dot(below, least, s, input_precision="ieee")
        else:
            s = tl.dot(queries, least, s, input_precision="ieee")
    if PAGES:
        s = tl.where(mask[None, :], s, float("-inf"))
    at = (line * r + number)[:, None] * n + j[None, :]
    tl.store(scores + at, s, mask=(number < r)[:, None] & (j < n)[None, :])


@triton.jit(do_not_specialize=_VARY)
def choose(
    scores, size, start, order, chosen, clusters, n, m, heads, r,
    CLUSTERS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The tokens of the best clusters, int64 chosen [B, H, M]. Grid: (clusters, row and head).

    A program owns a cluster: how many tokens better ones have says where its own go. scores: fp32
    [B, H, C]; size, start: int32 [B, Hk, C]; order: int32 [B, Hk, N].
    """
    mine = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    group = line // (heads * r) * heads + line % (heads * r) // r
    score = tl.load(scores + line * clusters + mine)
    before = 0
    for lo in range(0, clusters, CLUSTERS):
        j = lo + tl.arange(0, CLUSTERS)
        other = tl.load(scores + line * clusters + j, mask=j < clusters, other=float("-inf"))
        better = (other > score) | ((other == score) & (j < mine))
        tokens = tl.load(size + group * clusters + j, mask=better & (j < clusters), other=0)
        before += tl.sum(tokens, axis=0)
    tokens = tl.minimum(tl.load(size + group * clusters + mine), m - before)
    begin = tl.load(start + group * clusters + mine)
    for lo in range(0, tokens, TOKENS):
        i = lo + tl.arange(0, TOKENS)
        slot = tl.load(order + group * n + begin + i, mask=i < tokens, other=0)
        tl.store(chosen + line * m + before + i, slot.to(tl.int64), mask=i < tokens)
