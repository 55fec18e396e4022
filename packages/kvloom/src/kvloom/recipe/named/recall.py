"""Recall: every token stays, and a step reads only the tokens that fit its queries.

ClusterKV: manipulating LLM KV cache in semantic space for recallable compression
(arXiv:2412.03213). Keys are clustered by cosine similarity: one cluster for every `size` tokens, of
the prompt and of every 320 generated tokens. A query reads the clusters whose centroids have the
largest inner product with it, until the budget is full. It always reads the first 16 tokens, and
generated tokens that are not in a cluster yet. Departure: clusters of 40 tokens, after at most 10
iterations, where the paper has 80 and 20.

Quest: query-aware sparsity for efficient long-context LLM inference (arXiv:2406.10774). Pages of 16
tokens store the smallest and the largest key of every channel. A query reads the pages with the
largest upper bound of q . k.

InfiniGen: efficient generative inference of large language models with dynamic KV cache management
(arXiv:2406.19707). The queries of the prompt give a rotation after which 30% of the channels make
up most of q . k. A query reads the tokens with the largest q . k in them. `recall.partial_keys` has
the departures.

topk reads the tokens with the largest q . k themselves. It reads every key to find them, and so is
the oracle for the others.

Departures of all four: the query heads of a key/value head choose together, so that a step reads a
token once for all of them. In ClusterKV they take turns (group="turns"), in the others they choose
by the mean of their scores (group="mean"). With group="each" every query head chooses alone, as in
the papers' code. Steps of several tokens (a second turn, a draft) read everything.
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import RecipeError
from ...recall import TIERS, Clusters, Index, Pages, PartialKeys, Recall, Tier, TopK
from ..spec import Protect, Recipe
from .kivi import kivi


def clusterkv(
    tokens: int = 1024,
    size: int = 40,
    distance: str = "cosine",
    iterations: int = 10,
    sinks: int = 16,
    group: str = "turns",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
    seed: int = 0,
) -> Recipe:
    """ClusterKV (arXiv:2412.03213): everything stays, the nearest clusters are read.

    tier: device, host or file. steps: tokens that the last `steps` steps read stay on the device.
    """
    later = max(1, Clusters.block // size) if size > 0 else 1  # clusters of a block
    index = Clusters(size, Clusters.block, later, distance, iterations, seed)
    recipe = _recipe(index, tokens, sinks, 0, group, full_layers)
    return _in(tier, steps, recipe)


def clusterkv_2bit(
    tokens: int = 1024,
    size: int = 40,
    sinks: int = 16,
    group: str = "turns",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """ClusterKV over a store of KIVI's 2 bits.

    tier: device, host or file, of packed tokens. steps: tokens that the last `steps` steps read
    stay on the device, unpacked.
    """
    recipe = clusterkv(tokens, size, sinks=sinks, group=group, full_layers=full_layers)
    packed = kivi()
    protect = Protect(sinks, packed.protect.recent)
    recipe = replace(recipe, store=packed.store, protect=protect)
    return _in(tier, steps, recipe)


def quest(
    tokens: int = 1024,
    page: int = 16,
    sinks: int = 16,
    recent: int = 64,
    group: str = "mean",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """Quest (arXiv:2406.10774): everything stays, the most promising pages are read.

    tier: device, host or file. steps: tokens that the last `steps` steps read stay on the device.
    """
    recipe = _recipe(Pages(page), tokens, sinks, recent, group, full_layers)
    return _in(tier, steps, recipe)


def infinigen(
    tokens: int = 1024,
    share: float = 0.3,
    sinks: int = 16,
    recent: int = 64,
    group: str = "mean",
    full_layers: int = 2,
    tier: str = "device",
    steps: int = 1,
) -> Recipe:
    """InfiniGen (arXiv:2406.19707): everything stays, rotated partial keys say what is read.

    share: of the channels in the index. tier: device, host or file. steps: tokens that the last
    `steps` steps read stay on the device.
    """
    recipe = _recipe(PartialKeys(share), tokens, sinks, recent, group, full_layers)
    return _in(tier, steps, recipe)


def topk(
    tokens: int = 1024,
    sinks: int = 16,
    recent: int = 64,
    group: str = "mean",
    full_layers: int = 2,
) -> Recipe:
    """The tokens with the largest q . k are read: the oracle of recall."""
    return _recipe(TopK(), tokens, sinks, recent, group, full_layers)


def _recipe(
    index: Index,
    tokens: int,
    sinks: int,
    recent: int,
    group: str,
    full_layers: int,
) -> Recipe:
    recall = Recall(index, tokens, group, full_layers)
    return Recipe(recall=recall, protect=Protect(sinks, recent))


def _in(tier: str, steps: int, recipe: Recipe) -> Recipe:
    """Return the recipe with its tokens in a tier, "device" for none."""
    if tier != "device" and tier not in TIERS:
        raise RecipeError(
            f"tier={tier!r} is not one of device, {', '.join(TIERS)}; tier=device keeps every "
            "token on the device"
        )
    if tier == "device":
        if steps != 1:
            raise RecipeError(
                f"steps={steps} says what stays on the device beside a tier, but tier=device has "
                "none; add tier=host or tier=file, or leave steps out"
            )
        return recipe
    assert recipe.recall is not None
    return replace(recipe, recall=replace(recipe.recall, tier=Tier(tier, steps=steps)))
