"""What is held: never more than budgeted, protected tokens bit by bit, bytes as predicted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import probe
from backends import by_reference
from families import BY_AGE
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.recipe import Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from sampling import slow_except
from steps import D, allocated, build, core_recipes, draw, feed

every_budget = pytest.mark.parametrize(
    "recipe", slow_except(BY_AGE, "streaming", "least", "half", "tenth, recent")
)
sizes = st.lists(st.one_of(st.just(1), st.integers(1, 90)), min_size=1, max_size=8)
seeds = st.integers(0, 999)


def held(cache: LayerCache) -> int:
    """Tokens that a cache holds."""
    sinks = 0 if probe.sinks(cache) is None else min(cache.seen, probe.sinks(cache).count)
    return sinks + probe.count(cache)


@every_budget
@given(sizes, st.booleans(), seeds)
def test_the_budget_is_never_exceeded(recipe, sizes, padding, seed):
    q, k, v = draw(seed, sum(sizes), batch=2)
    visible = torch.ones(2, sum(sizes), dtype=torch.bool)
    visible[1, : sizes[0] // 2] = False
    cache, at = LayerCache(recipe), 0
    protected = recipe.protect.sinks + max(recipe.protect.exact_recents)
    for t in sizes:
        part = [x[:, :, at : at + t] for x in (q, k, v)]
        feed(cache, *part, visible=visible[:, : at + t] if padding else None)
        at += t
        budget = max(recipe.keep.budget.resolve(sizes[0]), protected)
        assert held(cache) <= budget
        assert held(cache) == min(at, budget) or padding  # and nothing is dropped without need


@every_budget
@given(sizes, seeds)
def test_sinks_and_the_newest_tokens_survive_a_budget(recipe, sizes, seed):
    n = sum(sizes)
    q, k, v = draw(seed, n)
    cache = build(recipe, q, k, v, sizes)
    survivors(cache, recipe, k, v)
    body = probe.count(cache)
    for side, x in ((probe.keys(cache), k), (probe.values(cache), v)):
        assert body == 0 or torch.equal(side.tail.view(), x[:, :, n - body :])


def survivors(cache: LayerCache, recipe: Recipe, k, v) -> None:
    """Protected tokens are held bit by bit, outside the packed store."""
    sinks = min(recipe.protect.sinks, cache.seen)
    if sinks:
        assert torch.equal(probe.sinks(cache).keys[:, :, :sinks], k[:, :, :sinks])
        assert torch.equal(probe.sinks(cache).values[:, :, :sinks], v[:, :, :sinks])
    sides = (probe.keys(cache), probe.values(cache))
    for side, recent, x in zip(sides, recipe.protect.exact_recents, (k, v), strict=True):
        recent = min(recent, cache.seen - sinks)
        if recent:
            newest = side.tail.view()[:, :, -recent:]
            assert torch.equal(newest, x[:, :, -recent:])


@by_reference
@core_recipes
@given(sizes, st.sampled_from([torch.float32, torch.bfloat16]), seeds)
def test_protected_tokens_survive_bit_by_bit(recipe, sizes, dtype, seed):
    q, k, v = (x.to(dtype) for x in draw(seed, sum(sizes)))
    survivors(build(recipe, q, k, v, sizes), recipe, k, v)


@pytest.mark.parametrize("name", ["kivi", "rtn", "full"])
def test_predicted_bytes_hold_for_a_prompt_longer_than_one_chunk_of_packing(name):
    n = 4096 + 300
    _, k, v = draw(0, n)
    cache = LayerCache(resolve(name))
    cache.prefill(StepInputs(Queries(k[:, :, -1:], 1.0), k, v))
    assert cache.nbytes == resolve(name).nbytes(n, Geometry(1, 2, 1, D, torch.float32))


@pytest.mark.sample
@core_recipes
@pytest.mark.parametrize("prompt", [1, 40, 500])
def test_spare_room_after_many_steps_is_a_sixteenth_and_32_tokens_a_buffer(recipe, prompt):
    steps = 100
    q, k, v = draw(0, prompt + steps)
    cache = build(recipe, *(x[:, :, :prompt] for x in (q, k, v)))
    geometry = Geometry(1, 2, 1, D, torch.float32)
    for i in range(prompt, prompt + steps):
        cache.attend(*(x[:, :, i : i + 1] for x in (q, k, v)), scale=1.0)
        spare = 0
        for stored, live in allocated(probe.tokens(cache)):
            row = stored[:, :, :1].nbytes if stored.shape[2] else 0
            spare += row * (32 + (live + 1) / 16 + 1)  # + 1: the step's own token
        exact = recipe.nbytes(i + 1, geometry)
        assert exact <= cache.nbytes <= exact + spare


@core_recipes
def test_reset_gives_everything_back(recipe):
    cache = build(recipe, *draw(0, 100))
    cache.reset()
    assert (cache.seen, cache.nbytes, probe.count(cache)) == (0, 0, 0)
