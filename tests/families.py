"""Recipes of every kind that evicts by score or recalls, with small budgets and many decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvloom.cache.build import build_layers
from kvloom.cache.layer import LayerCache
from kvloom.keep import Budget, Keep, KeyNorm, Mass, Observation, Outliers
from kvloom.positions.rope import Rope
from kvloom.recall import Clusters, Index, Pages, Recall, Tier
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import LayerFacts, Packed, Store
from sampling import slow_except
from steps import CORE as CORE_STORES
from steps import RECIPES, D, draw, feed, state

LAYERS = 2  # of which the last one recalls
ROPE = Rope(1e4 ** (-torch.arange(0, D, 2) / D))

BY_AGE = {
    "window": resolve("window:tokens=20"),
    "streaming": resolve("streaming:tokens=24,sinks=4"),
    "least": resolve("streaming:tokens=3,sinks=2"),
    "half": Recipe(keep=Keep(Budget(fraction=0.5))),
    "tenth": Recipe(keep=Keep(Budget(fraction=0.1)), protect=Protect(sinks=4)),
    "recent": Recipe(keep=Keep(Budget(tokens=30)), protect=Protect(sinks=2, exact_recent=10)),
    "tenth, recent": Recipe(keep=Keep(Budget(fraction=0.1)), protect=Protect(exact_recent=8)),
}

SCORED = {
    name: resolve(name)
    for name in (
        "h2o",
        "h2o:tokens=30,recent=0.0",
        "h2o:tokens=70",
        "h2o:tokens=20,limit=40,damping=0.9",
        "h2o:tokens=30,positions=renumbered",
        "keyformer:fixed=true",
        "dilated:tokens=20",
        "keyformer:noise=none,tau_end=1.5",
        "snapkv:tokens=24,window=8",
        "minikv:group=16,residual=32",
        "minikv-snap:window=8,residual=32",
    )
} | {
    "shared": Recipe(
        Keep(Budget(24, recent=8), Mass(), when="prompt", shared=True), protect=Protect(2)
    )
}

STORES = {
    "exact": ("full", 1),
    "balanced": ("balanced:group=16,residual=16", 16),
    "kivi": ("kivi:group=32,residual=32", 32),
}
"""Stores of `ragged`, and how many tokens each packs together."""


def ragged(store="exact", heads=0.2, layers="uniform", tokens=80, recent=7, sinks=4) -> Recipe:
    """Heads compete by lengths of keys, which a test can compute as well."""
    stored = resolve(STORES[store][0])
    budget = Budget(tokens, recent=recent, layers=layers, head_share=heads)
    keep = Keep(budget, KeyNorm(), when="prompt")
    return Recipe(keep, stored.store, protect=Protect(sinks, stored.protect.exact_recent))


RAGGED = {f"{store}, {layers}": ragged(store, layers=layers)
          for store in STORES for layers in ("uniform", "joint")}  # fmt: skip

BLOCK = "rotated:fraction=0.4,recent=8,block=32"
JOINT_BLOCK = f"{BLOCK},head_share=0.2,layers=joint"
PACKED_BLOCK = "tiny:fraction=0.4,recent=8,block=32,group=16,residual=16"
BLOCKS = {name: resolve(f"{name},contribution=false")  # these layers have no norms of inputs
          for name in (BLOCK, JOINT_BLOCK)} | {PACKED_BLOCK: resolve(PACKED_BLOCK)}  # fmt: skip


def recalling(
    index: str,
    tokens: int = 40,
    packed: bool | str = False,
    recent: int = 0,
    sinks: int = 4,
    tier: Tier | None = None,
    block: int = 20,
) -> Recipe:
    """Recall of few tokens, with an index that takes in tokens often."""
    names = {"clusters": "clusterkv:size=8", "pages": "quest:page=8", "topk": "topk",
             "partial": "infinigen"}  # fmt: skip
    found = resolve(names[index]).recall.index
    if index == "clusters":
        found = replace(found, block=block, block_clusters=3)
    if index == "partial":
        found = replace(found, block=block)
    packing = "kivi:group=16,residual=16" if packed is True else packed or "full"
    return Recipe(
        store=resolve(packing).store,
        recall=Recall(found, tokens, full_layers=LAYERS - 1, tier=tier),
        protect=Protect(sinks, recent),
        name=index,
    )


RECALLED = {
    "clusters": recalling("clusters"),
    "clusters, window": recalling("clusters", recent=9),
    "clusters, packed": recalling("clusters", packed=True),
    "pages": recalling("pages", recent=5),
    "pages, packed": recalling("pages", packed=True, recent=3),
    "pages, no sinks": recalling("pages", sinks=0),
    "pages, packed, rotated": recalling(
        "pages", packed="near-lossless:group=16,residual=16", recent=3
    ),
    "topk": recalling("topk", recent=5),
    "topk, packed": recalling("topk", packed=True),
    "partial": recalling("partial", recent=5),
    "partial, packed": recalling("partial", packed=True),
    "partial, host": recalling("partial", tier=Tier("host")),
    "clusters, host": recalling("clusters", tier=Tier("host")),
    "pages, file": recalling("pages", recent=3, tier=Tier("file", steps=2)),
    "clusters, packed, host": recalling("clusters", packed=True, block=16, tier=Tier("host")),
    "keys packed, file": replace(
        recalling("pages", recent=3, tier=Tier("file", steps=2)),
        store=Store(keys=Packed(3, "channel", 16, "fp8", residual=16)),
    ),
}

KEPT = 64  # tokens that `evicting` leaves of a prompt
CLUSTERS = Clusters(size=8, block=16, block_clusters=3)


def evicting(scorer, index: Index, tokens=30, store="full", recent=0, tier=None, **keep) -> Recipe:
    """Recall over the tokens that a keep has left of the prompt."""
    budget = Budget(tokens=KEPT, recent=8, layers=keep.pop("layers", "uniform"))
    return Recipe(
        keep=Keep(budget, scorer, when="prompt", **keep),
        store=resolve(store).store,
        recall=Recall(index, tokens, full_layers=LAYERS - 1, tier=tier),
        protect=Protect(4, recent),
        name="recall after eviction",
    )


RECALLED_AFTER_EVICTION = {
    "h2o, clusters": evicting(Mass(), CLUSTERS),
    "snapkv, pages, window": evicting(Observation(8), Pages(8), recent=5),
    "h2o, packed clusters": evicting(Mass(), CLUSTERS, store="kivi:group=16,residual=16"),
    "h2o, packed pages in a file": evicting(
        Mass(), Pages(8), store="kivi:group=16,residual=16", tier=Tier("file")
    ),
    "snapkv, clusters on the host": evicting(Observation(8), CLUSTERS, tier=Tier()),
}

OUTLIERS = {
    "outliers": Recipe(
        store=Store(Packed(2, "token", 16), Packed(1.5, "token", 32, "fp8")),
        protect=Protect(2, 6, Outliers(5, Mass())),
    ),
    "outliers, kivi": Recipe(
        store=Store(Packed(2, "channel", 16, residual=32), Packed(2, "token", 16)),
        protect=Protect(2, (0, 32), Outliers(64, Mass())),
    ),
}

FAMILIES = SCORED | RAGGED | BLOCKS | RECALLED | RECALLED_AFTER_EVICTION | OUTLIERS
CORE = (
    "h2o:tokens=30,recent=0.0",
    "h2o:tokens=20,limit=40,damping=0.9",
    "keyformer:noise=none,tau_end=1.5",
    "shared",
    "minikv:group=16,residual=32",
    "exact, joint",
    "kivi, uniform",
    BLOCK,
    PACKED_BLOCK,
    "clusters, window",
    "pages, packed, rotated",
    "partial, packed",
    "keys packed, file",
    "h2o, clusters",
    "outliers, kivi",
)
"""Families with every part of a layer between them."""

scored_recipes = pytest.mark.parametrize("recipe", slow_except(FAMILIES, *CORE))
"""Every family with `-m slow`; those of CORE by default."""
all_recipes = pytest.mark.parametrize(
    "recipe", slow_except(RECIPES | FAMILIES, *CORE, *CORE_STORES)
)
"""These, and the recipes of `core_recipes`."""


def layers(recipe: Recipe | str, count: int = LAYERS) -> list[LayerCache]:
    """The empty layers of a model."""
    facts = [LayerFacts(rope=ROPE) for _ in range(count)]
    return build_layers(resolve(recipe), range(count), facts, [ROPE] * count)


def tokens(n: int, batch: int = 2, seed: int = 0, count: int = LAYERS) -> list[tuple[Tensor, ...]]:
    """Queries, keys and values of each layer; keys of some heads are longer, so that these win."""
    longer = 1 + 0.3 * torch.arange(2)[:, None, None]
    drawn = [draw(count * seed + i, n, batch=batch, hq=4, hk=2) for i in range(count)]
    return [(q, k * (longer + 0.2 * i), v) for i, (q, k, v) in enumerate(drawn)]


def run(caches: list[LayerCache], qkv, sizes: list[int], visible=None, at: int = 0) -> Tensor:
    """Let all layers take tokens from `at` on, step by step; the outputs [layers, B, Hq, T, D]."""
    steps = []
    for size in sizes:
        see = None if visible is None else visible[:, : caches[0].seen + size]
        parts = [[x[:, :, at : at + size] for x in each] for each in qkv]
        outs = [feed(c, *part, visible=see) for c, part in zip(caches, parts, strict=True)]
        steps.append(torch.stack(outs))
        at += size
    return torch.cat(steps, dim=3) if steps else torch.empty(0)


def held(caches: list[LayerCache], *without: str) -> dict:
    """All that the layers hold, by name."""
    states = enumerate(state(cache, *without) for cache in caches)
    return {f"{i}.{name}": x for i, each in states for name, x in each.items()}


def close(a: Tensor, b: Tensor) -> None:
    """Both are the same but for rounding."""
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
