"""What the tuner solves: bytes and costs of layers, the knapsack, and whole recipes."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_search import few

from kvloom.calibrate import can_repeat
from kvloom.hf import compat
from kvloom.recipe import Recipe
from kvloom_lab.tuner.candidates import (
    FORMATS,
    JOINT,
    OBSERVED,
    RECENTS,
    UNIFORM,
    Choice,
    LayerSizes,
    RecipeShape,
    by_layer,
    combined,
    recents,
    to_score,
)
from kvloom_lab.tuner.candidates import uniform as uniform_recipe
from kvloom_lab.tuner.knapsack import Knapsack
from kvloom_lab.tuner.problem import Bound, Costs, all_problems, repair, shrink_costs

# the knapsack


@pytest.mark.parametrize("seed", range(6))
def test_the_knapsack_finds_what_a_search_of_everything_finds(seed):
    rng = np.random.default_rng(seed)
    nbytes, costs = rng.integers(1, 40, (4, 5)) * 3, rng.random((4, 5))
    knapsack = Knapsack(nbytes, costs)
    every = list(itertools.product(range(5), repeat=4))
    for bound in (knapsack.fewest, 100, 230, knapsack.most):
        found = knapsack.within(bound)
        fits = [knapsack.cost(one) for one in every if knapsack.size(one) <= bound]
        assert (found is None) == (not fits)
        if found is not None:
            assert knapsack.size(found) <= bound
            assert knapsack.cost(found) == pytest.approx(min(fits))


def test_the_knapsack_finds_the_fewest_bytes_of_a_cost():
    rng = np.random.default_rng(0)
    knapsack = Knapsack(rng.integers(1, 40, (4, 5)), rng.random((4, 5)))
    every = list(itertools.product(range(5), repeat=4))
    found = knapsack.reaching(1.2)
    assert knapsack.cost(found) <= 1.2
    fewest = min(knapsack.size(one) for one in every if knapsack.cost(one) <= 1.2)
    assert knapsack.size(found) == fewest
    assert knapsack.reaching(0.0) is None
    assert knapsack.within(knapsack.fewest - 1) is None


def test_bytes_in_large_units_still_keep_the_bound(monkeypatch):
    monkeypatch.setattr("kvloom_lab.tuner.knapsack.CELLS", 16)
    rng = np.random.default_rng(1)
    knapsack = Knapsack(rng.integers(1, 997, (5, 6)), rng.random((5, 6)))
    for bound in range(knapsack.fewest, knapsack.most, 97):
        assert knapsack.size(knapsack.within(bound)) <= bound


# recipes by layer


def test_bytes_of_layers_add_up_to_those_of_the_recipe(model):
    geometry = compat.geometry(model)
    choices = combined(to_score(geometry))
    nbytes = dict(zip(choices, LayerSizes(geometry, 200, RecipeShape(8)).of(choices), strict=True))
    rng = np.random.default_rng(0)
    for _ in range(20):
        chosen = [choices[i] for i in rng.integers(0, len(choices), geometry.layers)]
        recipe = by_layer(chosen, geometry.layer_indices, RecipeShape(8))
        assert recipe.nbytes(200, geometry) == sum(nbytes[choice] for choice in chosen)
        for number, choice in zip(geometry.layer_indices, chosen, strict=True):
            plain = recipe.for_layer(number, geometry.layer_indices)
            assert replace(plain, name="") == replace(
                uniform_recipe(choice, RecipeShape(8)), name=""
            )


def test_choices_that_do_not_fit_the_heads_are_left_out(model):
    geometry = compat.geometry(model)
    assert geometry.head_dim == 16
    scored = to_score(geometry)
    assert not any(c.values.startswith("kivi") for c in combined(scored))
    wider = combined(to_score(replace(geometry, head_dim=64)))
    assert {c.values for c in wider} == set(FORMATS["values"])


def test_a_model_without_room_for_a_repetition_is_not_offered_kvzip(model):
    geometry = compat.geometry(model)
    evicting = uniform_recipe(Choice(kept="kvzip-0.5"), RecipeShape(4))
    assert can_repeat(model, 240, evicting)
    assert not can_repeat(model, 480, evicting)  # it has 512 positions
    scored = to_score(geometry, repeats=False)
    assert not any("kvzip" in choice.kept for choice in combined(scored))
    assert scored.others == Choice(kept="snapkv-0.5")


def test_costs_are_drawn_to_the_mean_and_never_fall_with_the_bytes(model):
    scored = to_score(compat.geometry(model))
    choices = [*scored.formats, *scored.kept[1:]]
    nbytes = LayerSizes(compat.geometry(model), 512, RecipeShape(8)).of(choices)
    costs = np.random.default_rng(0).normal(0.1, 0.1, (3, len(choices)))
    costs[:, 0] = 0
    found = shrink_costs(costs, choices, nbytes)
    assert not found[:, 0].any()
    assert (found >= 0).all()
    assert (found >= (costs + costs.mean(axis=0)) / 2 - 1e-12).all()
    for kind in Choice._fields:
        same = [
            i
            for i, x in enumerate(choices)
            if x == Choice() or x._asdict()[kind] != Choice()._asdict()[kind]
        ]
        ordered = found[:, sorted(same, key=lambda i: -nbytes[i])]
        assert (np.diff(ordered, axis=1) >= 0).all()


class FakeScores:
    """Scores of a model that were drawn at random."""

    def __init__(self, geometry):
        self.scored, rng = to_score(geometry), np.random.default_rng(0)
        choices = [*self.scored.formats, *self.scored.kept[1:]]
        self.found = {n: dict(zip(choices, rng.random(len(choices)), strict=True))
                      for n in geometry.layer_indices}  # fmt: skip
        for found in self.found.values():
            found[Choice()] = 0.0

    def costs(self, layer):
        return self.found[layer]


LONG, NBYTES = 2048, 200_000


def drawn_problems(model, nbytes=None):
    geometry = compat.geometry(model)
    rng, names = np.random.default_rng(1), JOINT
    shares = {name: rng.uniform(0.3, 0.9, geometry.layers).round(4).tolist() for name in names}
    every = dict.fromkeys(recents(LONG), shares)
    return all_problems(
        FakeScores(geometry), LayerSizes(geometry, LONG, RecipeShape(8)), every, nbytes
    ), geometry


def test_bytes_and_costs_of_every_problem_are_those_of_its_recipes(model, monkeypatch):
    few(monkeypatch)
    found, geometry = drawn_problems(model, NBYTES)
    scores, rng = FakeScores(geometry), np.random.default_rng(2)
    assert len({problem.shape for problem in found}) == 4  # two windows; heads of a layer, of all
    for problem in found:
        chosen = [problem.choices[i] for i in rng.integers(0, len(problem.choices), 3)]
        recipe = problem.recipe(chosen)
        assert problem.size(chosen) == recipe.nbytes(LONG, geometry)
        for number, choice in enumerate(chosen):
            keep = recipe.for_layer(number, geometry.layer_indices).keep
            if choice.kept in problem.shares:
                assert keep.budget.fraction == problem.shares[choice.kept][number]
            else:
                assert (keep is None) == (choice.kept == "all")
    raw = found[1].costs([Choice("rotated-2", "turbo-4", "kvzip-0.5")] * 3)
    for number, row in enumerate(raw):
        own = scores.costs(number)
        want = [own[x] for x in Choice("rotated-2", "turbo-4", "kvzip-0.5").changes]
        assert row.tolist() == want


def test_costs_of_shares_lie_between_those_that_are_scored(model):
    scores = FakeScores(compat.geometry(model))
    singles = list(scores.costs(0))
    costs = Costs(singles, np.array([[scores.costs(n)[x] for x in singles] for n in range(3)]))
    shares = {"joint-0.1": [0.5, 0.35, 1.0]}
    found = costs.of([Choice("rotated-4", "exact", "joint-0.1")], shares)[:, 0]
    own = [{x.kept: cost for x, cost in scores.costs(n).items()} for n in range(3)]
    want = [own[0]["kvzip-0.5"], (own[1]["kvzip-0.3"] + own[1]["kvzip-0.4"]) / 2, 0.0]
    assert found[:, 2] == pytest.approx(want)
    assert found[:, 0].tolist() == [scores.costs(n)[Choice("rotated-4")] for n in range(3)]
    assert not found[:, 1].any()


def test_uniform_recipes_fill_the_bytes(model, monkeypatch):
    few(monkeypatch)
    found, geometry = drawn_problems(model, NBYTES)
    uniform = [problem for problem in found if problem.choices == [UNIFORM]]
    assert [problem.shape.recent for problem in uniform] == list(RECENTS)
    assert recents(LONG - 1) == [OBSERVED]
    for problem in uniform:
        recipe = problem.recipe([UNIFORM] * geometry.layers)
        assert recipe.keep.budget.layers == "joint"
        assert recipe.layers == ()
        assert recipe.nbytes(LONG, geometry) <= NBYTES
        share = recipe.keep.budget.fraction + 0.05
        more = uniform_recipe(UNIFORM, problem.shape, share)
        assert more.nbytes(LONG, geometry) > NBYTES
    assert not any(x.choices == [UNIFORM] for x in drawn_problems(model)[0])


def test_the_best_recipe_that_was_measured_is_found(model, monkeypatch):
    few(monkeypatch)
    found, geometry = drawn_problems(model, NBYTES)
    bound = Bound(NBYTES / Recipe().nbytes(LONG, geometry), None, Recipe().nbytes(LONG, geometry))
    kl = {}

    def measure(recipes):
        rng = np.random.default_rng(len(kl))
        kl.update({recipe: torch.tensor([rng.random()]) for recipe in recipes})
        return [kl[recipe] for recipe in recipes]

    first, *others = repair(found, bound, measure)
    assert first.recipe == min(kl, key=lambda recipe: kl[recipe].item())
    assert {x.recipe for x in (first, *others)} == set(kl)
    assert sum(x.choices[0] == UNIFORM for x in (first, *others)) == 2
    for one in (first, *others):
        assert one.nbytes == one.recipe.nbytes(LONG, geometry) <= bound.nbytes
