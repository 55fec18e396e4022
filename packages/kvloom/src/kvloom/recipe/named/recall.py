"""Recall: every token stays, and a step reads only the tokens that fit its queries.

docs/recipes states how each recipe departs from its paper. Options that they share:

tokens: how many a step reads, `sinks` and the newest `recent` included.
query_heads: how those of a key/value head choose together, so that a step reads a token once for
all of them: they take turns, or choose by the mean or max of their scores. With query_heads="each"
every query head chooses alone, as in the papers' code.
full_layers: first layers that read everything.
tier: where the tokens are stored: device, host or file. steps: beside a tier, the tokens that the
last `steps` steps read stay on the device, unpacked.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import RecipeError
from ...recall import TIERS, Clusters, Index, Pages, PartialKeys, Recall, Tier, TopK
from ..parts import Protect
from ..spec import Recipe
from .quantization import kivi


def clusterkv(
    tokens: int = 1024,
    size: int = 40,
    distance: str = "cosine",
    iterations: int = 10,
    sinks: int = 16,
    query_heads: str = "turns",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
    seed: int = 0,
) -> Recipe:
    """ClusterKV (arXiv:2412.03213): everything stays, the nearest clusters are read.

    Keys are clustered by cosine similarity: one cluster for every `size` tokens, of the prompt and
    of every 320 generated tokens. A query reads the clusters whose centroids have the largest inner
    product with it, until the budget is full. It always reads the first tokens, and generated
    tokens that are not in a cluster yet.
    """
    later = max(1, Clusters.block // size) if size > 0 else 1  # clusters of a block
    index = Clusters(size, Clusters.block, later, distance, iterations, seed)
    return _recipe(index, tokens, Protect(sinks), query_heads, full_layers, tier, steps)


def clusterkv_2bit(
    tokens: int = 1024,
    size: int = 40,
    sinks: int = 16,
    query_heads: str = "turns",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """ClusterKV over a store of KIVI's 2 bits."""
    exact = clusterkv(
        tokens,
        size,
        sinks=sinks,
        query_heads=query_heads,
        full_layers=full_layers,
        tier=tier,
        steps=steps,
    )
    packed = kivi(sinks=sinks)
    return replace(exact, store=packed.store, protect=packed.protect)


def quest(
    tokens: int = 1024,
    page: int = 16,
    sinks: int = 16,
    recent: int = 64,
    query_heads: str = "mean",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """Quest (arXiv:2406.10774): everything stays, the most promising pages are read.

    Pages of `page` tokens store the smallest and the largest key of every channel. A query reads
    the pages with the largest upper bound of q . k.
    """
    return _recipe(
        Pages(page), tokens, Protect(sinks, recent), query_heads, full_layers, tier, steps
    )


def infinigen(
    tokens: int = 1024,
    share: float = 0.3,
    sinks: int = 16,
    recent: int = 64,
    query_heads: str = "mean",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """InfiniGen (arXiv:2406.19707): everything stays, rotated partial keys say what is read.

    The queries of the prompt give a rotation after which a few channels, the part `share` of all,
    make up most of q . k. A query reads the tokens with the largest q . k in them.
    """
    index, protect = PartialKeys(share), Protect(sinks, recent)
    return _recipe(index, tokens, protect, query_heads, full_layers, tier, steps)


def topk(
    tokens: int = 1024,
    sinks: int = 16,
    recent: int = 64,
    query_heads: str = "mean",
    full_layers: int = 2,
) -> Recipe:
    """The tokens with the largest q . k are read: the oracle of recall.

    It reads every key to find them.
    """
    return _recipe(TopK(), tokens, Protect(sinks, recent), query_heads, full_layers)


def _recipe(
    index: Index,
    tokens: int,
    protect: Protect,
    query_heads: str,
    full_layers: int,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """Return a recipe that recalls, with its tokens in a tier, "device" for none."""
    if tier != "device" and tier not in TIERS:
        raise RecipeError(
            f"tier={tier!r} is not one of device, {', '.join(TIERS)}; tier=device keeps every "
            "token on the device"
        )
    if tier == "device" and steps != 1:
        raise RecipeError(
            f"steps={steps} says what stays on the device beside a tier, but tier=device has "
            "none; add tier=host or tier=file, or leave steps out"
        )
    offload = None if tier == "device" else Tier(tier, steps=steps)
    recall = Recall(index, tokens, query_heads, full_layers, offload)
    return Recipe(recall=recall, protect=protect)
