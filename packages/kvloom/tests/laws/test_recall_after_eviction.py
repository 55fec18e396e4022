"""Recall over what a keep left of the prompt: the keep's cache, of which a step reads a part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import probe
from backends import by_reference
from families import CLUSTERS, KEPT, RECALLED_AFTER_EVICTION, evicting
from kvloom.cache.build import coordinate
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse, RecipeError
from kvloom.keep import Mass
from kvloom.recipe import Recipe
from kvloom.recipe.resolve import resolve
from near import assert_near
from sampling import slow_except
from steps import assert_same_state, draw, feed, padded, state

PROMPT, SINKS = 120, 4
STEPS = [1] * 50
RECIPES = RECALLED_AFTER_EVICTION
every = pytest.mark.parametrize(
    "recipe", slow_except(RECIPES, *(RECIPES.keys() - {"h2o, clusters"}))
)


def fresh(recipe: Recipe, rank: int = 1):
    return LayerCache(recipe.for_layer(rank, range(2)), f"layer {rank}", rank, 2)


def heads(seed: int, tokens: int, batch: int = 2):
    return draw(seed, tokens, batch=batch, hq=4, hk=2)


@pytest.mark.sample
@every
@pytest.mark.parametrize("sizes", [[PROMPT, *STEPS], [100, 20, 7, *STEPS[7:]]])
@pytest.mark.parametrize("pads", [[0, 0], [80, 3]])
def test_with_a_budget_for_all_it_is_the_keeps_own_cache(recipe, sizes, pads):
    qkv, visible = heads(0, sum(sizes)), padded(pads, sum(sizes))
    roomy = replace(recipe, recall=replace(recipe.recall, tokens=1000))
    caches = fresh(roomy), fresh(replace(recipe, recall=None))
    got, want = (feed(cache, *qkv, sizes, visible if any(pads) else None) for cache in caches)
    assert (type(caches[0]), type(caches[1])) == (LayerCache, LayerCache)
    real = visible[:, None, :, None]
    if recipe.store.exact or not any(pads):
        torch.testing.assert_close(got * real, want * real, rtol=0, atol=2e-6)
    else:  # groups differ where padding lies elsewhere
        assert_near(got * real, want * real, 0.05)


@every
def test_nothing_that_stayed_is_lost(recipe):
    qkv = heads(1, PROMPT + len(STEPS))
    cache, want = fresh(recipe), fresh(replace(recipe, recall=None))
    for c in (cache, want):
        feed(c, *qkv, [PROMPT, *STEPS])
    assert probe.read(cache) < probe.read(want) == KEPT + len(STEPS)
    assert probe.dropped(cache) == probe.dropped(want) == PROMPT - KEPT
    probe.retriever(cache).restore(probe.tokens(cache))
    assert_same_state(state(cache, "retriever"), state(want))


@pytest.mark.sample
@every
@pytest.mark.parametrize("pads", [None, [90, 10], [0, 118]])
def test_a_step_reads_the_sinks_its_budget_and_what_is_not_indexed_yet(recipe, pads):
    cache, n = fresh(recipe), PROMPT + len(STEPS)
    cache.observe()
    visible, qkv = None if pads is None else padded(pads, n), heads(2, n)
    feed(
        cache,
        *(x[:, :, :PROMPT] for x in qkv),
        visible=None if visible is None else visible[:, :PROMPT],
    )
    unit = recipe.recall.index.unit
    found = (recipe.recall.tokens - recipe.always_read) // unit * unit
    front = 16 if recipe.recall.tier and not recipe.store.exact else SINKS  # whole groups
    for t in range(PROMPT, n):
        behind = t - (PROMPT - KEPT) - front - probe.indexed(cache)
        see = None if visible is None else visible[:, : t + 1]
        feed(cache, *(x[:, :, t : t + 1] for x in qkv), visible=see)
        assert probe.read(cache) == front + found + behind + 1
        index = probe.tokens(cache).logical(0, probe.count(cache), torch.device("cpu"))
        read = index.expand(2, 2, -1).gather(2, probe.recalled(cache))
        for row, pad in enumerate(pads or [0, 0]):
            for head in range(2):
                always = {*range(pad, min(pad + SINKS, PROMPT))}
                assert always <= set(read[row, head].tolist())
                assert len(set(read[row, head].tolist())) == front + found


@pytest.mark.parametrize("name", ["h2o, clusters", "snapkv, clusters on the host"])
def test_a_crop_goes_back_to_the_prompt_and_no_further(name):
    qkv, new = heads(7, PROMPT + len(STEPS)), heads(8, 30)
    cropped, never = fresh(RECIPES[name]), fresh(RECIPES[name])
    feed(cropped, *qkv, [PROMPT, *STEPS])
    with pytest.raises(CacheMisuse, match="crop of 51 tokens reaches into tokens of which"):
        cropped.crop(51)
    cropped.crop(50)
    feed(never, *(x[:, :, :PROMPT] for x in qkv))
    outputs = [feed(cache, *new, [1] * 30) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
    cropped.crop(cropped.seen)
    assert cropped.seen == probe.count(cropped) == probe.indexed(cropped) == 0


@by_reference
def test_a_keep_without_recall_refuses_the_same_crop():
    cache = fresh(replace(RECIPES["h2o, clusters"], recall=None))
    feed(cache, *heads(7, PROMPT + 10), [PROMPT, *[1] * 10])
    with pytest.raises(CacheMisuse, match="the newest 10 can be removed"):
        cache.crop(11)
    cache.crop(10)
    assert (cache.seen, probe.count(cache)) == (PROMPT, KEPT)


@pytest.mark.parametrize("keep", [{"shared": True}, {"layers": "variance"}])
def test_layers_that_wait_for_each_other_are_indexed_when_the_last_has_decided(keep):
    recipe = evicting(Mass(), CLUSTERS, **keep)
    recipe = replace(recipe, recall=replace(recipe.recall, full_layers=0))
    caches = [fresh(recipe, rank) for rank in range(2)]
    coordinate(caches)
    for seed, cache in enumerate(caches):
        assert probe.indexed(cache) == 0
        feed(cache, *heads(seed, PROMPT))
    for cache in caches:
        held = probe.count(cache)
        assert probe.indexed(cache) == held - SINKS
        feed(cache, *heads(9, 1))
        assert probe.read(cache) == recipe.recall.tokens + 1 < held
    assert sum(probe.count(cache) - 1 for cache in caches) == 2 * KEPT


@by_reference
@pytest.mark.parametrize(
    ("keep", "says"),
    [
        ({"when": "step"}, 'use a keep by score with when="prompt", or leave one of the two out'),
        ({"when": "limit", "limit": 99}, 'use a keep by score with when="prompt"'),
        ({"positions": "renumbered"}, "reads tokens at their own positions, not positions='renum"),
    ],
)
def test_what_cannot_be_recalled_from_is_refused(keep, says):
    recipe = RECIPES["h2o, clusters"]
    with pytest.raises(RecipeError) as refused:
        replace(recipe, keep=replace(recipe.keep, **keep))
    assert says in str(refused.value)
    with pytest.raises(RecipeError, match="use a keep by score"):
        replace(resolve("streaming"), recall=recipe.recall)
