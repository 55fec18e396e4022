"""SnapKV, PyramidKV and MiniKV keep what the rules of their official code keep."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive_recipes as rules
import probe
from kvloom.cache.build import coordinate
from kvloom.cache.layer import LayerCache
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from steps import draw

D = 32
SCALE = D**-0.5
HEADS = [(2, 2), (4, 2), (4, 1)]  # MHA, GQA, MQA


def sharp(seed: int, tokens: int, heads: tuple[int, int], batch: int = 2):
    """Random q, k, v; logits with a deviation of about 2."""
    q, k, v = draw(seed, tokens, batch, *heads, D)
    return 2 * q, k, v


def kept_by_head(layer: LayerCache, tokens) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
    """Attend to a prompt; for each head: the tokens it keeps, its queries and its keys."""
    layer.observe()
    q, k, v = tokens
    layer.attend(q, k, v, scale=SCALE)
    logical, r = layer.logical(), q.shape[1] // k.shape[1]
    return [
        (
            sorted(logical[b, h].tolist()),
            q[b, h * r : (h + 1) * r].double().numpy(),
            k[b, h].double().numpy(),
        )
        for b in range(k.shape[0])
        for h in range(k.shape[1])
    ]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pool", ["avg", "max", "none"])
@pytest.mark.parametrize(("window", "kernel"), [(4, 3), (8, 7), (16, 15)])
def test_snapkv_pools_the_votes_for_the_tokens_before_its_window(window, kernel, pool, heads):
    for seed, tokens in enumerate((41, 60, 97)):
        name = f"snapkv:tokens={window + 12},window={window},kernel={kernel},pool={pool}"
        layer = LayerCache(resolve(name), "layer 0", 0, 1)
        for kept, q, k in kept_by_head(layer, sharp(seed, tokens, heads)):
            want = rules.snapkv(q, k, SCALE, 12, window, kernel, pool)
            assert kept[12:] == want[12:]
            if pool == "max":  # neighbors share a maximum, and any of them may stay
                votes = rules.snapkv_votes(q, k, SCALE, window, kernel, pool)
                got, most = (sorted(votes[places[:12]]) for places in (kept, want))
                np.testing.assert_allclose(got, most, rtol=1e-5)
            else:
                assert kept == want


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [67, 96])
def test_minikv_snap_keeps_what_snapkv_keeps(tokens, heads):
    layer = LayerCache(resolve("minikv-snap:window=16,residual=16"), "layer 0", 0, 1)
    for kept, q, k in kept_by_head(layer, sharp(tokens, tokens, heads)):
        assert kept == rules.snapkv(q, k, SCALE, int(tokens * 0.5) - 16, 16, pool="avg")


@pytest.mark.parametrize("layers", [2, 6, 32])
@pytest.mark.parametrize("window", [8, 32])
def test_pyramidkv_divides_its_budget_as_kvcache_factory(layers, window):
    for budget in (100, 256, 512, 1024):
        rooms = resolve(f"pyramidkv:tokens={budget},window={window}").keep.layer_tokens
        average = budget - window
        for tokens in (budget // 2, budget - 1, budget, budget + 1, 2 * average - 1):
            want = rules.pyramidkv(tokens, budget, window, layers)
            assert [min(tokens, room) for room in rooms(tokens, layers)] == want
        for tokens in (2 * average, 2 * average + 3, 3 * budget, 20 * budget):
            got = rooms(tokens, layers)
            # its step between layers is rounded down; here the total is the budget's
            off = np.subtract(got, rules.pyramidkv(tokens, budget, window, layers))
            assert all(abs(off) <= 2 + np.arange(layers))
            assert sum(got) == budget * layers


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", [90, 140, 170])
def test_pyramidkv_keeps_snapkvs_tokens_in_every_layer(tokens, heads):
    """At 140 tokens the average of 72 beside the window is more than half of the prompt."""
    recipe, layers = resolve("pyramidkv:tokens=80,window=8"), 4
    caches = [LayerCache(recipe, f"layer {i}", i, layers) for i in range(layers)]
    coordinate(caches)
    rooms = recipe.keep.layer_tokens(tokens, layers)
    assert (rooms == [80] * layers) == (tokens < 144)
    for i, cache in enumerate(caches):
        for kept, q, k in kept_by_head(cache, sharp(i, tokens, heads)):
            assert kept == rules.snapkv(q, k, SCALE, rooms[i] - 8, 8)
    held = sum(cache.nbytes for cache in caches)
    index = sum(probe.tokens(cache).logical_index.nbytes for cache in caches)  # of the trace
    assert held - index == recipe.nbytes(tokens, Geometry(layers, *heads, D, torch.float32), 2)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ("", (0.25, 0.25)),
        ("fraction=0.25", (0.125, 0.125)),
        ("fraction=0.4,recent=0.75", (0.1, 0.3)),
    ],
)
def test_minikv_rounds_each_share_down(options, shares, heads):
    for tokens in (30, 41, 42, 43, 55, 99):
        layer = LayerCache(resolve(f"minikv:residual=16,{options}"), "layer 0", 0, 1)
        for kept, q, k in kept_by_head(layer, sharp(tokens, tokens, heads)):
            assert kept == rules.minikv(q, k, SCALE, *shares)
