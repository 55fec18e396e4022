"""Budgets per head: how they are divided and spelled, and what they do not combine with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.keep import PROTECTED, Budget, Keep, Mass, Observation, head_budgets
from kvloom.recall import Pages, Recall
from kvloom.recipe import LayerOverride, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from kvloom.store import Format, Store

GEOMETRY = Geometry(4, 8, 2, 64, torch.float32)
KEEP = Keep(Budget(64, recent=8, head_share=0.2), Observation(8), when="prompt")


@dataclass(frozen=True)
class Whole(Format):
    """A format of another distribution."""

    kind: ClassVar[str] = "whole"


def test_adakv_by_hand():
    """Two heads and four tokens: the best scores are 9, 8, 5 and 4, three of them head 0's."""
    ranked = torch.tensor([[[9.0, 5.0, 4.0, 1.0], [8.0, 3.0, 2.0, 0.0]]])
    assert head_budgets.divide(ranked, 4, 1).tolist() == [[3, 1]]


def test_units_by_hand():
    """Medians of units of three: 8 and 2 in head 0, 5 and 4 in head 1."""
    ranked = torch.tensor([[[9.0, 8.0, 7.0, 3.0, 2.0, 1.0], [6.0, 5.0, 5.0, 4.0, 4.0, 0.0]]])
    assert head_budgets.divide(ranked, 9, 3).tolist() == [[3, 6]]


def test_a_unit_with_a_token_that_stays_comes_first():
    """Its median is 1, less than that of the other units."""
    for stays in (PROTECTED, torch.inf):
        ranked = torch.tensor([[[9.0, 8.0, 7.0, 3.0, 2.0, 1.0], [stays, 1.0, 1.0, 0.0, 0.0, 0.0]]])
        assert head_budgets.divide(ranked, 3, 3).tolist() == [[0, 3]]


@pytest.mark.parametrize("unit", [1, 32, 160])
@pytest.mark.parametrize("heads", [1, 3, 8])
@given(st.integers(0, 3000), st.integers(1, 3000), st.floats(0, 1))
@example(84, 17, 0.8105)  # of 3 heads and units of 32: rounding leaves each head 1 unit, not 2
def test_every_head_keeps_its_share(heads, unit, heavy, evicted, share):
    guaranteed, contested = head_budgets.shares(heavy, evicted, share, heads, unit)
    assert share * heavy - 1e-3 <= guaranteed <= heavy
    assert 0 <= heavy * heads - guaranteed * heads - contested < heads  # lost to rounding
    assert contested % unit == 0
    winnable = (heavy - guaranteed + evicted) // unit * unit
    assert contested <= heads * winnable
    most = heads * (1 - share) * heavy - heads  # but for whole tokens
    assert contested > min(most - unit, heads * (winnable - unit))
    assert head_budgets.shares(heavy, evicted, 1.0, heads, unit) == (heavy, 0)


@given(st.integers(0, 99), st.integers(1, 5), st.integers(0, 20), st.sampled_from([1, 4]))
def test_the_total_is_exact_with_ties_and_padding(seed, heads, units, unit):
    g = torch.Generator().manual_seed(seed)
    n = 20 * unit + seed % unit
    scores = torch.randint(0, 4, (2, heads, n), generator=g).float()
    scores[0, :, 5:] = -torch.inf
    scores[:, :, :2] = torch.inf
    ranked = scores.sort(dim=-1, descending=True).values
    counts = head_budgets.divide(ranked, heads * units * unit, unit)
    assert counts.sum(dim=1).tolist() == [heads * units * unit] * 2
    assert (counts % unit == 0).all()
    best, more = head_budgets.select(scores, 3, counts.clamp(max=n - 3))
    assert torch.equal(more.sum(dim=-1), counts.clamp(max=n - 3))
    assert not more.gather(2, best).any()


@pytest.mark.parametrize(
    "name",
    [
        "snapkv:head_share=0.2",
        "kvzip:head_share=0,layers=joint,store=kivi-4",
        "small",
        "tiny:head_share=0.5",
    ],
)
def test_every_spelling_is_the_same_recipe(name):
    recipe = resolve(name)
    assert recipe.keep.budget.head_share is not None
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert recipe.problems(GEOMETRY) == []


@pytest.mark.parametrize("name", ["small", "tiny"])
def test_heads_of_all_layers_compete_in_recommended_recipes(name):
    assert resolve(name).keep.budget.layers == "joint"
    assert resolve(name).keep.budget.head_share == 0.2
    uniform = resolve(f"{name}:head_share=1").keep.budget
    assert (uniform.layers, uniform.head_share) == ("uniform", None)


@pytest.mark.parametrize("name", ["snapkv", "kvzip"])
def test_a_share_of_one_is_the_recipe_without_heads(name):
    assert resolve(f"{name}:head_share=1.0").keep == resolve(name).keep
    assert "\nheads" not in resolve(name).to_toml()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"when": "step"}, 'with a score and when="prompt"'),
        ({"positions": "renumbered"}, 'use "original"'),
        ({"shared": True}, "leave one out"),
    ],
)
def test_what_a_keep_refuses(change, why):
    scorer = Mass() if "when" in change else KEEP.scorer
    with pytest.raises(RecipeError, match=why):
        replace(KEEP, scorer=scorer, **change)


@given(
    st.integers(1, 300), st.integers(1, 40), st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    st.integers(1, 8), st.sampled_from([1, 8, 32, 40, 64]),
)  # fmt: skip
def test_heads_can_win_what_they_compete_for(heavy, evicted, head_share, heads, unit):
    certain, contested = head_budgets.shares(heavy, evicted, head_share, heads, unit)
    assert contested % unit == 0
    assert contested <= heads * ((heavy + evicted - certain) // unit * unit)
    assert 0 <= heads * (heavy - certain) - contested < heads


def test_a_block_grants_whole_units():
    assert head_budgets.granted(wanted=50, heads=2, tokens=20, unit=8) == 32
    assert head_budgets.granted(wanted=30, heads=2, tokens=20, unit=8) == 24
    assert head_budgets.granted(wanted=-3, heads=2, tokens=20, unit=8) == 0


def test_a_block_has_the_tokens_that_are_packed_together():
    keep = replace(KEEP, budget=Budget(fraction=0.5, head_share=0.2), when="block", block=24)
    store = resolve("kivi:group=32,residual=32").store
    with pytest.raises(RecipeError, match="block=24 is less than the 32 tokens that the store"):
        Recipe(keep, store)
    Recipe(replace(keep, block=32), store)


def test_what_a_budget_refuses():
    for heads in (-0.1, 1.5):
        with pytest.raises(RecipeError, match=r"head_share=.* must lie in \[0, 1\]"):
            Budget(64, head_share=heads)
    with pytest.raises(RecipeError, match="head_share='a few' must be"):
        Budget(64, head_share="a few")
    with pytest.raises(RecipeError, match="give head_share"):
        Budget(64, layers="joint")


def test_what_a_recipe_refuses():
    with pytest.raises(RecipeError, match="recall reads equal numbers"):
        Recipe(KEEP, recall=Recall(Pages(8), 32))
    for name in ("skvq", "rptq", "smoothquant"):
        with pytest.raises(RecipeError, match=r"(keys|values): head_share=0\.2 takes tokens that"):
            Recipe(KEEP, store=resolve(name).store)
        with pytest.raises(RecipeError, match=r"layers 'last 1': (keys|values): head_share=0\.2"):
            Recipe(KEEP, layers=(LayerOverride("last 1", store=resolve(name).store),))


def test_a_format_of_another_distribution_may_have_budgets_per_head():
    store = Store(values=Whole())
    assert Recipe(KEEP, store=store).store == store


@pytest.mark.parametrize(
    ("geometry", "why"),
    [({"ranks": 2}, "one of 2 parts"), ({"alibi": True}, r"by their positions \(ALiBi\)")],
)
def test_what_a_model_cannot_have(geometry, why):
    with pytest.raises(IncompatibleRecipe, match=why):
        Recipe(KEEP).check(replace(GEOMETRY, **geometry))
