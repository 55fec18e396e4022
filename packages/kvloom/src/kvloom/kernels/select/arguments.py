"""The arguments of the kernels that score, choose and cluster.

Heads count batch rows times heads; strides are in bytes. Importing this does not import Numba.
"""

from ..arguments import MATRIX, TOKENS, VECTOR, Arguments

SCORE = Arguments(
    heads=int,
    kv_heads=int,
    rows=int,  # query rows per key/value head
    count=int,  # clusters or pages
    q=int,  # fp32 [heads, rows, D]; for pages its positive part
    q_low=int,  # for pages the negative part
    scores=int,  # result: fp32 [heads, rows, count]
    high=TOKENS,  # centroids, or upper bounds
    low=TOKENS,  # lower bounds
    alive=MATRIX,  # bool [B, Hk, count], of clusters
)

SELECT = Arguments(
    heads=int,
    heads_per_kv=int,
    turns=int,  # query heads that take turns, 1: a head chooses alone
    count=int,  # clusters or pages
    budget=int,  # tokens to choose
    page=int,  # tokens of a page, 0: clusters
    scores=int,  # fp32 [heads, turns, count]
    slots=int,  # result: int64 [heads, budget]
    size=int,  # int32 [B, Hk, count]
    start=int,  # int32 [B, Hk, count], where a cluster begins in `order`
    order=int,  # int32 [B, Hk, tokens]
    tokens=int,
)

BOUND = Arguments(
    heads=int,
    kv_heads=int,
    pages=int,
    page=int,  # tokens of a page
    largest=float,  # the largest number of the keys' dtype
    low=int,  # result: fp32 [heads, pages, D]
    high=int,
    x=TOKENS,
    nonpadding=VECTOR,  # bool [B, N], address 0: all tokens count
)

NEAREST = Arguments(
    heads=int,
    kv_heads=int,
    tokens=int,
    panels=int,
    weights=int,  # [heads, panels, D, panel]
    offsets=int,  # fp32 [heads, panels, panel]
    labels=int,  # result: int64 [heads, tokens]
    x=TOKENS,
)

SUM = Arguments(
    heads=int,
    kv_heads=int,
    tokens=int,
    clusters=int,
    sums=int,  # result: fp32 [heads, clusters, D], zeros before
    labels=int,  # int64 [heads, tokens]
    x=TOKENS,
)
