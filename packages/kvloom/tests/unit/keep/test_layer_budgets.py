"""Budgets over layers, and layers that decide together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import probe
from floor import short_prompts_evict
from kvloom.cache.build import coordinate
from kvloom.cache.layer import LayerCache
from kvloom.errors import RecipeError
from kvloom.keep import Budget, Keep, Mass
from kvloom.keep.budgets import POLICIES, split, weights
from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from steps import SCALE, draw

__all__ = ["short_prompts_evict"]


@given(
    st.integers(0, 5000),
    st.lists(st.floats(0.001, 100), min_size=1, max_size=40),
    st.integers(1, 300),
)
def test_the_total_is_preserved_to_the_token(total, shares, most):
    given_out = split(total, shares, most)
    assert sum(given_out) == min(total, most * len(shares))
    assert all(0 <= tokens <= most for tokens in given_out)


def test_minikvs_pyramid_by_hand():
    """Depth 7: the bottom layer gets 2x - x/7, the top one x/7; x = 70, 3 layers: 130, 70, 10."""
    assert split(210, weights("pyramid", 3), 1000) == [130, 70, 10]


@pytest.mark.parametrize("policy", ["variance", "inverse-variance"])
def test_variances_beyond_fp32_divide_equally(policy):
    for value in (float("inf"), float("nan")):
        assert weights(policy, 3, [1.0, value, 2.0]) == [1, 1, 1]


def test_a_list_of_weights_is_one_a_layer():
    assert split(100, weights((3, 1), 2), 1000) == [75, 25]
    with pytest.raises(RecipeError, match="2 layer budgets for a model with 3 layers"):
        weights((3, 1), 3)


def together(recipe: Recipe, steps: int, layers: int = 3):
    caches = [LayerCache(recipe, f"layer {i}", i, layers) for i in range(layers)]
    coordinate(caches)
    for number, tokens in enumerate([60, *[1] * steps]):
        for i, cache in enumerate(caches):
            cache.attend(*draw(10 * number + i, tokens, hq=4, hk=2), scale=SCALE)
    return caches


@pytest.mark.parametrize("steps", [0, 1, 12])
def test_one_score_for_all_layers_keeps_the_same_tokens_in_all(steps):
    h2o = resolve("h2o")
    caches = together(replace(h2o, keep=replace(h2o.keep, shared=True)), steps)
    kept = [probe.kept(cache) for cache in caches]
    assert all(torch.equal(index, kept[0]) for index in kept)
    alone = [probe.kept(cache) for cache in together(h2o, steps)]
    assert not all(torch.equal(index, alone[0]) for index in alone)


@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"joint"}))  # with heads alone
@pytest.mark.parametrize("name", ["h2o", "minikv", "snapkv:tokens=30,window=8"])
def test_every_policy_holds_the_same_total(name, policy):
    recipe = resolve(name)
    budget = replace(recipe.keep.budget, layers=policy)
    recipe = replace(recipe, keep=replace(recipe.keep, budget=budget))
    caches = together(recipe, 0)
    assert sum(probe.count(c) for c in caches) == 3 * 30
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_what_exceeds_a_cap_goes_to_layers_of_weight_0():
    assert split(144, [0, 0, 1], 84) == [30, 30, 84]


@pytest.mark.parametrize("options", ["layers=pyramid", "layers=pyramidkv,limit=90"])
def test_a_shared_score_of_each_step_refuses_layers_with_different_numbers(options):
    with pytest.raises(RecipeError, match=r"different numbers of tokens; use layers=\"uniform\""):
        resolve(f"h2o:tokens=40,shared=true,{options}")
    resolve("h2o:tokens=40,shared=true,layers=variance")
    Keep(Budget(40, recent=8, layers="pyramid"), Mass(), when="prompt", shared=True)
