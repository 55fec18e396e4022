"""Keeping by score: noise, damping, windows and limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import probe
from kvloom.cache.layer import LayerCache
from kvloom.kernels import dispatch
from kvloom.recipe.resolve import resolve
from steps import SCALE, draw, feed


def fresh(name, *qkv):
    cache = LayerCache(resolve(name))
    feed(cache, *qkv)
    return cache


def test_h2o_is_keyformer_without_noise():
    qkv, new = draw(0, 50), draw(1, 20)
    budget = "fraction=0.5,recent=0.3"
    outputs = [
        feed(fresh(name, *qkv), *new, [1] * 20)
        for name in (f"h2o:{budget}", f"keyformer:{budget},noise=none,tau_end=1.0")
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("fixed", ["false", "true"])
def test_noise_is_reproducible_and_matters(fixed):
    qkv, new = draw(0, 80), draw(1, 20)
    name = f"keyformer:fixed={fixed}"
    one, two = (feed(fresh(name, *qkv), *new, [1] * 20) for _ in range(2))
    assert torch.equal(one, two)
    without = feed(fresh("keyformer:noise=none", *qkv), *new, [1] * 20)
    assert not torch.equal(one, without)


@pytest.mark.parametrize("backend", dispatch.CHOICES)
def test_a_seed_may_be_any_whole_number(backend):
    qkv, new = draw(0, 80), draw(1, 20)
    outputs = []
    for seed in (0, 1 << 70, -(1 << 32), 5):
        recipe = resolve("keyformer")
        recipe = replace(recipe, keep=replace(recipe.keep, seed=seed))
        with dispatch.use(backend):
            cache = LayerCache(recipe)
            feed(cache, *qkv)
            outputs.append(feed(cache, *new, [1] * 20))
    assert torch.equal(outputs[0], outputs[1])  # of a seed 32 bits count
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])


def test_fixed_noise_is_other_noise():
    qkv, new = draw(0, 80), draw(1, 20)
    fixed, drawn = (
        feed(fresh(f"keyformer:fixed={flag}", *qkv), *new, [1] * 20) for flag in ("true", "false")
    )
    assert not torch.equal(fixed, drawn)


def test_damping_forgets():
    """Damped a lot, only the last steps count, so that other tokens stay."""
    qkv, new = draw(0, 80), draw(1, 20)
    kept = []
    for damping in (1.0, 0.01):
        cache = fresh(f"h2o:recent=0.2,damping={damping}", *qkv)
        feed(cache, *new, [1] * 20)
        kept.append(probe.kept(cache))
    assert not torch.equal(*kept)


def test_a_dilated_window_keeps_every_second_token():
    cache = fresh("dilated:tokens=10", *draw(0, 50))
    assert probe.kept(cache)[0, 0].tolist() == [*range(32, 50, 2), 49]
    feed(cache, *draw(1, 5), [1] * 5)
    held = probe.kept(cache)[0, 0].tolist()
    assert held == [*range(36, 54, 2), 54]


@pytest.mark.parametrize("name", ["h2o:tokens=20,limit=40", "window:tokens=20,limit=40"])
def test_a_limit_is_reached_and_then_the_budget_holds(name):
    cache = fresh(name, *draw(0, 30))
    assert probe.count(cache) == 30
    sizes = []
    for i in range(50):
        cache.attend(*draw(1 + i, 1), scale=0.2)
        sizes.append(probe.count(cache))
    assert sizes[9:11] == [40, 20]
    assert sizes[30:32] == [40, 20]
    assert max(sizes) == 40
    assert min(sizes) == 20


@pytest.mark.parametrize("sizes", [[1] * 24, [10, 14], [3, 20, 1]])
def test_a_limit_keeps_what_scoring_every_step_keeps(sizes):
    """The scores at the moment of dropping are sums over the same queries, however they came."""
    qkv, new = draw(0, 30), draw(1, 24)
    cache = fresh("h2o:tokens=20,limit=53", *qkv)
    feed(cache, *new, sizes)
    assert probe.count(cache) == 20
    once = fresh(
        "h2o:tokens=20,limit=53", *(torch.cat(both, 2) for both in zip(qkv, new, strict=True))
    )
    assert torch.equal(probe.tokens(cache).logical_index, probe.tokens(once).logical_index)


@pytest.mark.parametrize("name", ["h2o", "keyformer", "h2o:fraction=0.3,recent=0.0"])
def test_slots_never_grow(name):
    cache = LayerCache(resolve(name))
    cache.attend(*draw(0, 100), scale=SCALE)
    held = cache.nbytes
    for i in range(40):
        cache.attend(*draw(1 + i, 1), scale=SCALE)
        assert cache.nbytes == held
