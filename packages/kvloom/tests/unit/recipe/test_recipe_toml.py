"""Recipes as plain dicts and as TOML: any comes back the same, and what is wrong is named."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.errors import RecipeError
from kvloom.keep import Budget, Keep
from kvloom.recall import Clusters, Pages, Recall, TopK
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom.store import Packed, Store

formats = st.none() | st.builds(
    Packed,
    bits=st.sampled_from([1, 1.5, 2, 3, 4, 8]),
    axis=st.sampled_from(["channel", "token"]),
    group=st.sampled_from([16, 32, 64, 128]),
    meta=st.sampled_from(["fp32", "fp16", "bf16", "fp8"]),
    residual=st.sampled_from([128, 256]),
)
by_token = partial(st.builds, Packed, axis=st.just("token"), meta=st.just("fp8"))
formats |= by_token(
    bits=st.sampled_from([1.5, 2]),
    span=st.sampled_from(["head", "layer"]),
    reorder=st.booleans(),
    clip=st.sampled_from([1.0, 0.9, "group", "layer"]),
    smooth=st.booleans(),
)
formats |= by_token(bits=st.just(3), rotation=st.sampled_from(["group", "head"]))
formats |= by_token(bits=st.just(4), static=st.just(True), reorder=st.just(True))
numbers = st.integers(0, 500)
protects = st.builds(Protect, sinks=numbers, exact_recent=numbers | st.tuples(numbers, numbers))
budgets = st.builds(Budget, tokens=st.integers(1001, 10**6)) | st.builds(
    Budget, fraction=st.floats(1e-9, 1)
)
indexes = st.builds(
    Clusters, size=st.integers(1, 500), distance=st.sampled_from(["cosine", "l2", "inner"])
) | st.builds(Pages, page=st.integers(1, 99))
recalls = st.builds(
    Recall,
    index=indexes | st.builds(TopK),
    tokens=st.integers(1500, 10**6),
    query_heads=st.sampled_from(["mean", "max", "turns", "each"]),
)
recipes = st.builds(
    Recipe, store=st.builds(Store, formats, formats), recall=recalls, protect=protects
)
recipes |= st.builds(
    Recipe, store=st.builds(Store, formats, formats), protect=protects
) | st.builds(Recipe, keep=st.builds(Keep, budget=budgets), protect=protects)


@given(recipes)
def test_any_recipe_comes_back_from_a_dict_and_from_toml(recipe):
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_toml(recipe.to_toml()) == recipe


def test_named_recipes_come_back_too():
    recipes = {name: resolve(name) for name in RECIPES}
    assert {name: Recipe.from_dict(x.to_dict()) for name, x in recipes.items()} == recipes
    assert {name: Recipe.from_toml(x.to_toml()) for name, x in recipes.items()} == recipes


@given(st.text())
def test_any_name_comes_back_from_toml(name):
    assert Recipe.from_toml(Recipe(name=name).to_toml()).name == name


def test_a_dict_is_plain_and_without_none():
    recipe = Recipe(store=Store(values=Packed(4, "token")), protect=Protect(2, (0, 128)))
    assert recipe.to_dict() == {
        "store": {
            "values": {
                "bits": 4,
                "axis": "token",
                "group": 32,
                "meta": "fp16",
                "span": "head",
                "clip": 1.0,
                "rotation": "none",
                "residual": 1,
            }
        },
        "protect": {"sinks": 2, "exact_recent": [0, 128]},
        "name": "custom",
    }


def test_a_toml_written_by_hand():
    assert Recipe.from_toml(
        """
            name = "mine"
            [store.keys]
            bits = 4
            axis = "channel"
            residual = 64
            [protect]
            exact_recent = [0, 64]
            """
    ) == Recipe(
        store=Store(keys=Packed(4, "channel", residual=64)),
        protect=Protect(exact_recent=(0, 64)),
        name="mine",
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"kep": {}}, "Recipe has no field 'kep'; it has keep, store, recall, protect, name"),
        ({"store": {"both": {"bits": 2, "axis": "token"}}}, "no field 'both'; it has keys, values"),
        ({"store": {"keys": {"bits": 2, "axes": "token"}}}, "no field 'axes'; it has bits, axis"),
        ({"store": {"keys": {"bits": 2}}}, "keys: Packed needs the field 'axis'"),
        ({"keep": {}}, "give one"),
        ({"keep": {"budget": {"tokens": 8}, "score": 1}}, "Keep has no field 'score'"),
        ({"protect": {"last": 1}}, "Protect has no field 'last'; it has sinks, exact_recent"),
        ({"protect": {"recent": 1, "exact_recent": 2}}, "Protect has no field 'recent'; it has"),
        ({"recall": {"index": "tree"}}, "index kind='tree' is not one of clusters, pages, topk"),
        (
            {"keep": {"budget": {"tokens": 5}, "scorer": {"kind": [1]}}},
            "kind=[1] is not one of",
        ),
        (
            {"keep": {"budget": {"tokens": 5}, "scorer": {"kind": "mass", "sums_attention": True}}},
            "Mass has no field 'sums_attention'; it has damping",
        ),
        # a section that is no section
        ({"protect": 3}, "protect"),
        ({"keep": {"budget": 3}}, "budget"),
        ({"store": {"keys": 2}}, "keys"),
        ({"store": 2}, "store"),
    ],
)
def test_bad_data_is_refused_by_name(data, says):
    with pytest.raises(RecipeError) as refused:
        Recipe.from_dict(data)
    assert says in str(refused.value)


def test_text_that_is_no_toml_is_refused():
    with pytest.raises(RecipeError, match="not a TOML recipe"):
        Recipe.from_toml("bits: 2")


@pytest.mark.parametrize("text", [f"start = {'1' * 5000}", f"a = {'[' * 9000}"])
def test_toml_that_python_does_not_parse_is_refused(text):
    with pytest.raises(RecipeError, match="not a TOML recipe"):
        Recipe.from_toml(f"{text}\n")


def test_a_kind_alone_is_its_defaults():
    table = {"recall": {"index": "pages", "tokens": 500}}
    assert Recipe.from_dict(table) == Recipe(recall=Recall(Pages(), 500))
