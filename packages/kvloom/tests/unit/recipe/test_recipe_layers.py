"""Recipes that differ by layer, and recipes that stay exact up to a number of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layered import FOUR, SNAP, TWO, stores

from floor import short_prompts_evict
from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.keep import Budget, Keep, Mass, Outliers
from kvloom.recall import Pages, Recall
from kvloom.recipe import Geometry, LayerOverride, Protect, Recipe, resolve
from kvloom.store import Store

__all__ = ["short_prompts_evict"]

HYBRID = (1, 3, 5, 7)  # the cached layers of a model where every second layer has a sliding window


def geometry(layers: int = 4, numbers: tuple[int, ...] | None = None) -> Geometry:
    return Geometry(layers, 4, 2, 64, torch.bfloat16, cached=numbers)


# --- which layers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "layers"),
    [
        (3, [3]),
        ("3", [3]),
        ("0-2", [0, 1, 2]),
        (" 4 - 5 ", [4, 5]),
        ("first 2", [0, 1]),
        ("first2", [0, 1]),
        ("last 1", [5]),
        ("last 6", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_a_place_names_layers(where, layers):
    recipe = Recipe(layers=(LayerOverride(where, store=FOUR),))
    assert [n for n in range(6) if stores(recipe)[n] == FOUR] == layers


@pytest.mark.parametrize(
    "where",
    [
        "",
        "-1",
        "2-1",
        "first",
        "first 0",
        "last -1",
        "middle 2",
        "1,2",
        "9" * 5000,
        1.0,
        True,
        None,
    ],
)
def test_another_place_is_refused(where):
    with pytest.raises(RecipeError, match="does not name layers; use a number"):
        LayerOverride(where, store=FOUR)


@pytest.mark.parametrize(
    ("where", "cached"),
    [("1", [1]), ("0-4", [1, 3]), ("3-7", [3, 5, 7]), ("first 1", [1]), ("last 2", [5, 7])],
)
def test_numbers_are_the_models_and_ends_count_cached_layers(where, cached):
    recipe = Recipe(layers=(LayerOverride(where, store=FOUR),))
    assert [n for n in HYBRID if recipe.for_layer(n, HYBRID).store == FOUR] == cached
    recipe.check(geometry(4, HYBRID))


@pytest.mark.parametrize("where", ["2", "9", "4-4", "0-0", "6-8", "first 5", "last 5"])
def test_layers_that_are_not_cached_are_refused_by_name(where):
    recipe = Recipe(layers=(LayerOverride(where, store=FOUR),), name="mine")
    (problem,) = recipe.problems(geometry(4, HYBRID))
    assert problem == (
        f"layers {recipe.layers[0].where!r}: kvloom does not cache all of these; name some of the "
        "4 that it caches: 1, 3, 5, 7"
    )
    with pytest.raises(IncompatibleRecipe, match="'mine' does not fit this model: layers"):
        recipe.check(geometry(4, HYBRID))


# --- which parts ---------------------------------------------------------------------------------


def test_parts_not_given_stay_and_none_removes():
    base = Recipe(keep=SNAP, store=FOUR, recall=Recall(Pages(), 500, full_layers=0))
    recipe = replace(
        base,
        layers=(
            LayerOverride(1, keep=None),
            LayerOverride(2, recall=None, protect=Protect(3)),
            LayerOverride(3, store=Store()),
        ),
    )
    found = [recipe.for_layer(n, range(4)) for n in range(4)]
    assert found == [
        base,
        replace(base, keep=None),
        replace(base, recall=None, protect=Protect(3)),
        replace(base, store=Store()),
    ]
    assert all(one.layers == () for one in found)


def test_the_later_override_wins_part_by_part():
    recipe = Recipe(
        layers=(
            LayerOverride("0-3", store=FOUR, protect=Protect(1)),
            LayerOverride("2-5", store=TWO),
        )
    )
    assert stores(recipe) == [FOUR, FOUR, TWO, TWO, TWO, TWO]
    sinks = [recipe.for_layer(n, range(6)).protect.sinks for n in range(6)]
    assert sinks == [1, 1, 1, 1, 0, 0]


def test_the_first_cached_layers_do_not_recall():
    quest = resolve("quest:full_layers=2")
    assert [quest.for_layer(n, HYBRID).recall is None for n in HYBRID] == [True, True, False, False]
    late = resolve("full@last 1=quest")
    assert [late.for_layer(n, HYBRID).recall is None for n in HYBRID] == [True] * 3 + [False]


def test_equal_recipes_of_layers_are_one_object():
    numbers = range(4)
    recipe = resolve("kivi@first 2=full@3=full")
    a, b, c, d = (recipe.for_layer(n, numbers) for n in numbers)
    assert a is b is d
    assert a is not c
    again = resolve("kivi@first 2=full@3=full").for_layer(0, list(numbers))
    assert again is a


def test_recipes_that_only_seem_equal_stay_apart():
    one, share = (Recipe(keep=Keep(Budget(10, recent=r), Mass())) for r in (1, 1.0))
    assert one == share  # as Python compares 1 and 1.0
    kept = [r.for_layer(0, [0]).keep.budget.recent_of(99) for r in (one, share)]
    assert kept == [1, 10]
    both = replace(one, layers=(LayerOverride("2-3", keep=share.keep),))
    assert both.budget_groups(range(4)) == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_heads_compete_over_layers_of_equal_keep_and_store():
    own = "snapkv:fraction=0.5,head_share=0.2,layers=joint"
    together, apart = [(0, 4), (1, 4), (2, 4), (3, 4)], [(0, 3), (0, 1), (1, 3), (2, 3)]
    for store, want in (("full", together), ("kivi", apart)):
        recipe = replace(resolve(own), layers=(LayerOverride(1, store=resolve(store).store),))
        assert recipe.budget_groups(range(4)) == want
    uniform = replace(recipe.keep.budget, layers="uniform")
    alike = replace(recipe, keep=replace(recipe.keep, budget=uniform))
    assert alike.budget_groups(range(4)) == together


def test_a_budget_is_divided_over_layers_of_equal_keep():
    recipe = resolve("pyramidkv:tokens=40,window=4@1=full@last 1=full")
    assert recipe.budget_groups(range(5)) == [(0, 3), (0, 2), (1, 3), (2, 3), (1, 2)]
    room = recipe.keep.layer_tokens(1000, 3)
    g = geometry(5)
    exact = 1000 * 2 * 2 * 64 * 2
    assert recipe.nbytes(1000, g) == sum(room) * 2 * 2 * 64 * 2 + 2 * exact
    weights = resolve("h2o").with_budget(40)
    weights = replace(weights, keep=replace(weights.keep, budget=Budget(40, layers=(3.0, 1.0))))
    assert weights.problems(geometry(2)) == []
    assert "2 layer budgets for a model with 3 layers" in weights.problems(geometry(3))[0]
    assert replace(weights, layers=(LayerOverride(0, keep=None),)).problems(geometry(3)) == []


# --- what does not fit ---------------------------------------------------------------------------


def test_problems_name_the_layers():
    recipe = resolve("full@3=kivi:group=64@0-1=kivi")
    assert recipe.problems(Geometry(4, 4, 2, 80, torch.bfloat16)) == [
        "layers 0-1: values: group=32 does not divide head_dim=80; use 16",
        "layer 3: values: group=64 does not divide head_dim=80; use 16",
    ]
    assert recipe.problems(geometry()) == []


def test_an_override_that_does_not_combine_is_refused_at_once():
    with pytest.raises(RecipeError, match="layers 'first 2': keep drops single tokens"):
        Recipe(store=FOUR, layers=(LayerOverride("first 2", keep=Keep(Budget(9))),))


def test_overrides_that_do_not_combine_with_each_other_name_the_layer():
    recipe = Recipe(
        layers=(LayerOverride("0-2", keep=Keep(Budget(9))), LayerOverride("2-3", store=FOUR))
    )
    (problem,) = recipe.problems(geometry())
    assert problem.startswith("layer 2: keep drops single tokens")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: LayerOverride(0), "layers '0': give a part to override: keep, store, recall or"),
        (lambda: LayerOverride(0, store=None), "store=None must be a Store"),
        (lambda: LayerOverride(0, keep="all"), "keep='all' must be a Keep or None"),
        (lambda: Recipe(layers=[LayerOverride(0, store=FOUR)]), "must be a tuple, each item a"),
        (lambda: Recipe(layers=(FOUR,)), "must be a tuple, each item a LayerOverride"),
    ],
)
def test_what_is_not_an_override_is_refused(build, says):
    with pytest.raises(RecipeError) as refused:
        build()
    assert says in str(refused.value)


def test_a_budget_reaches_the_overrides():
    recipe = resolve("full@0=h2o@1=quest@2=kivi")
    assert recipe.budgeted
    changed = recipe.with_budget(96)
    budgets = [changed.for_layer(n, range(3)) for n in range(3)]
    assert budgets[0].keep.budget.tokens == 96
    assert changed.layers[1].recall.tokens == 96
    assert budgets[2].store == resolve("kivi").store
    assert not resolve("full@0=kivi").budgeted


# --- bytes ---------------------------------------------------------------------------------------


@given(st.integers(0, 700), st.integers(1, 3))
def test_bytes_are_the_sum_over_layers(tokens, batch):
    parts = ("h2o", "kivi", "full", "rtn:bits=4")
    recipe = resolve("@".join([parts[0], *(f"{i}={p}" for i, p in enumerate(parts) if i)]))
    single = geometry(1)
    assert recipe.nbytes(tokens, geometry(), batch) == sum(
        resolve(part).nbytes(tokens, single, batch) for part in parts
    )


@pytest.mark.parametrize(
    ("recipe", "queries"),
    [
        ("kivi", 0),
        ("window:tokens=20", 0),
        ("quest:tokens=96", 0),
        ("h2o", 4),
        ("snapkv:tokens=64", 4),
        ("skvq:outliers=8", 4),
    ],
)
def test_up_to_the_start_everything_is_exact(recipe, queries):
    g, plain, later = geometry(), resolve(recipe), replace(resolve(recipe), compress_after=100)
    sinks = plain.protect.sinks  # they have room of their own, and each row's first position
    for tokens in (1, 100):
        exact = resolve("full").nbytes(max(tokens, sinks), g, 3) + 3 * 4 * 8 * bool(sinks)
        assert later.nbytes(tokens, g, 3) == exact + 3 * 4 * queries * tokens * 64 * 2
    for tokens in (101, 1000):
        assert later.nbytes(tokens, g, 3) == plain.nbytes(tokens, g, 3)
    assert later.for_layer(3, g.layer_indices).compress_after == 100


def test_queries_are_counted_in_the_layers_that_score():
    recipe = resolve("h2o:compress_after=50@first 3=full")
    g = geometry()
    assert recipe.nbytes(50, g) == 50 * g.token_nbytes() + 50 * 4 * 64 * 2


def test_outliers_need_the_queries():
    assert Recipe(store=TWO, protect=Protect(outliers=Outliers(4))).reads_queries
    assert not Recipe(keep=Keep(Budget(9))).reads_queries


@pytest.mark.parametrize("start", [-1, 1.0, True, "5", None])
def test_a_bad_start_is_refused(start):
    with pytest.raises(RecipeError, match="must be a whole number of tokens, 0 or more"):
        Recipe(compress_after=start)
