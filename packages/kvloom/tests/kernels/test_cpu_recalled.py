"""A layer that recalls reads by kernels what it reads by the reference."""

from __future__ import annotations

import pytest
import torch

import probe
from kv_views import known, mapped
from kvloom.cache.layer import LayerCache
from kvloom.keep import Budget, Keep, Mass
from kvloom.kernels import dispatch
from kvloom.positions.rope import Rope
from kvloom.recall import Clusters, Recall
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import resolve
from kvloom.store import LayerFacts, Packed, Store
from steps import D, draw, feed

PROMPT, STEPS = 330, 12
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
RECIPES = (
    "clusterkv:tokens=60,size=10,sinks=4",
    "clusterkv:tokens=60,size=10,sinks=4,query_heads=each",
    "clusterkv-2bit:tokens=200,size=10,sinks=4",
    "quest:tokens=60,page=8,sinks=4,recent=5",
    "quest:tokens=60,page=8,sinks=0,recent=5,query_heads=max",
)
SKVQ = Store(
    mapped(2, 16, "fp8", pre_rope=True, span="layer", reorder=True, clip="group"),
    mapped(1.5, 16, "fp8", span="layer", reorder=True, clip="group"),
)
ROTATED = Store(mapped(3, 0, rotation="group"), mapped(4, 16, rotation="group"))
BEFORE_ROPE = Store(
    Packed(2, "channel", 16, residual=16, pre_rope=True), mapped(2, 16, smooth=True)
)
THIN = Keep(Budget(tokens=200, recent=8), Mass(), when="prompt")
COMPOSED = {  # store, keep, sinks and window
    "skvq": (SKVQ, None, Protect(4, 7)),
    "skvq of what a keep left": (SKVQ, THIN, Protect(4)),
    "rotated": (ROTATED, None, Protect(0, 5)),
    "keys by channel before RoPE, of what a keep left": (BEFORE_ROPE, THIN, Protect(4)),
}
OPERATIONS = {"attend", "kmeans", "page_bounds", "page_scores", "cluster_scores"}
OPERATIONS |= {"select_clusters", "select_pages"}


@pytest.mark.sample
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("more", ["", "padding", "padding, alibi", "softcap"])
def test_steps_by_kernels_are_steps_by_the_reference(name, more):
    n = PROMPT + STEPS
    qkv = draw(3, n, batch=2, hq=4, hk=2)
    options = {"softcap": 5.0 if "softcap" in more else None}
    if "padding" in more:
        options["visible"] = torch.arange(n) >= torch.tensor([0, 90])[:, None]
    if "alibi" in more:
        options["slopes"] = SLOPES
    outs, read = [], []
    for backend in ("auto", "ref"):
        cache = LayerCache(resolve(name), "layer 2", 2, 3)
        dispatch.ran.clear()
        with dispatch.use(backend):
            outs.append(feed(cache, *qkv, [PROMPT, *[1] * STEPS], **options)[:, :, PROMPT:])
        read.append(probe.read(cache))
        ran = {operation for operation, who, _ in dispatch.ran if who == "cpu"} & OPERATIONS
        assert len(ran) == (4 if backend == "auto" else 0)
    assert read[0] == read[1] < PROMPT
    torch.testing.assert_close(*outs, rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    "name", ["skvq", *(pytest.param(x, marks=pytest.mark.slow) for x in COMPOSED if x != "skvq")]
)
@pytest.mark.parametrize("pads", [(0, 0), (0, 90)])
def test_recall_composes_with_any_store(name, pads):
    store, keep, protect = COMPOSED[name]
    recall = Recall(Clusters(size=10, block=16, block_clusters=3), 60, full_layers=0)
    recipe = Recipe(keep=keep, store=store, recall=recall, protect=protect)
    turns = Rope(10000.0 ** -(torch.arange(0, D, 2) / D))
    facts = LayerFacts(known(store.keys, 2, D), known(store.values, 2, D), turns)
    n = PROMPT + STEPS
    qkv, visible = draw(3, n, batch=2, hq=4, hk=2), torch.arange(n) >= torch.tensor(pads)[:, None]
    outs = []
    for backend in ("auto", "ref"):
        cache = LayerCache(recipe, "a layer", 0, 1, turns, facts)
        dispatch.ran.clear()
        with dispatch.use(backend):
            fed = feed(cache, *qkv, [PROMPT, *[1] * STEPS], visible if any(pads) else None)
        outs.append(fed[:, :, PROMPT:])
        ran = {who for operation, who, _ in dispatch.ran if operation == "attend"}
        assert ran == {"cpu" if backend == "auto" else "ref"}
    torch.testing.assert_close(*outs, rtol=0, atol=4e-6)
