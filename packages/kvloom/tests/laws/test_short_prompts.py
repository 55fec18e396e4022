"""Recipes that evict, on prompts of 16 to 1,024 tokens: the shortest stay whole, none is ruined."""

from __future__ import annotations

import pytest
import torch

from backends import by_reference
from kvloom.cache import fill
from kvloom.keep.policy import FLOOR_TOKENS
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom.recipe.spec import Recipe
from kvloom_lab.workload.layers import LayerShape, empty_layers, random_qkv

pytestmark = [pytest.mark.floor, by_reference]

LENGTHS = (16, 40, FLOOR_TOKENS - 1, FLOOR_TOKENS, FLOOR_TOKENS + 1, 160, 256, 400, 640, 1024)
LAYERS = 4
SHAPE = LayerShape(6, 3, 32, dtype=torch.float32)
GEOMETRY = Geometry(LAYERS, 6, 3, 32, torch.float32)
NAMED = {name: resolve(name) for name in RECIPES}
EVICTING = {name: recipe for name, recipe in NAMED.items() if recipe.keep is not None}
EVERY = EVICTING | {f"{name}, 0.2": recipe.with_budget(0.2) for name, recipe in EVICTING.items()}
every_recipe = pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY)


def kept(recipe: Recipe, tokens: int) -> int:
    """The tokens of a prompt that all layers keep, averaged over heads, by the budget."""
    if recipe.keep.by_age:
        return LAYERS * min(tokens, recipe.budget_tokens(tokens))
    return sum(min(tokens, room) for room in recipe.keep.layer_tokens(tokens, LAYERS))


@every_recipe
def test_a_short_prompt_stays_whole(recipe):
    assert all(kept(recipe, n) == LAYERS * n for n in range(1, FLOOR_TOKENS))


@every_recipe
def test_a_longer_prompt_keeps_more(recipe):
    tokens = [kept(recipe, n) for n in range(1, 1025)]
    assert tokens == sorted(tokens)


@every_recipe
def test_a_quarter_of_the_budget_is_chosen_by_score(recipe):
    if recipe.keep.by_age:
        return
    for n in range(FLOOR_TOKENS, 1025):
        window, budget = recipe.keep.budget.recent_of(n), recipe.keep.budget.resolve(n)
        assert 4 * (budget - window - recipe.protect.sinks) >= budget


@pytest.mark.parametrize("recent", [200, 1000])
def test_a_wide_window_leaves_half_of_a_fraction(recent):
    for n in LENGTHS:
        budget = resolve(f"tiny:recent={recent}").keep.budget
        assert budget.recent_of(n) <= budget.resolve(n) / 2


@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("name", ["small", "tiny", "snapkv:fraction=0.25,head_share=0.2"])
def test_heads_compete_for_a_third_of_what_is_chosen_by_score(name, heads):
    keep, store = resolve(name).keep, resolve(name).store
    for n in range(FLOOR_TOKENS + 1, 1025):
        room, window = keep.budget.resolve(n), keep.budget.recent_of(n)
        if room < n:
            _, contested = keep.head_shares(n, room, heads, store.block_tokens)
            assert 3 * contested >= heads * (room - window)


@every_recipe
def test_bytes_are_those_predicted_and_no_more_than_of_an_exact_cache(recipe):
    """Scores, positions and spans take up to 16 bytes a head and token, a slot is one token."""
    for n in LENGTHS:
        layers = empty_layers(recipe, SHAPE, LAYERS)
        q, k, v = random_qkv(SHAPE, n)
        for i, layer in enumerate(layers):
            fill(layer, q, k * (1 + 0.1 * i), v)
        held = sum(layer.nbytes for layer in layers)
        assert held == recipe.nbytes(n, GEOMETRY)
        assert held <= NAMED["full"].nbytes(n + 1, GEOMETRY) + 16 * 3 * LAYERS * (n + 1)
