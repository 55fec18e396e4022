"""Recipe, Protect, Packed, Store: what is refused, with what words, and what it will hold."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from floor import short_prompts_evict
from kvloom.errors import IncompatibleRecipe, RecipeError
from kvloom.keep import Budget, Keep, Mass, Noisy, Observation, Scorer
from kvloom.recall import Clusters, Pages, Recall, Tier, TopK
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom.store import Encoding, Packed, Store

__all__ = ["short_prompts_evict"]


def geometry(head_dim: int = 64, layers: int = 2, kv_heads: int = 2) -> Geometry:
    return Geometry(layers, 4, kv_heads, head_dim, torch.bfloat16)


# --- validation: what is wrong, and what would be right ------------------------------------------


@pytest.mark.parametrize(
    ("fields", "wrong", "right"),
    [
        ({"bits": 5}, "bits=5", "1, 1.5, 2, 3, 4, 8"),
        ({"bits": "2"}, "bits='2'", "1, 1.5, 2, 3, 4, 8"),
        ({"bits": True}, "bits=True", "1, 1.5, 2, 3, 4, 8"),
        ({"bits": 2.0}, "bits=2.0", "1, 1.5, 2, 3, 4, 8"),
        ({"axis": "row"}, "axis='row'", "channel, token"),
        ({"group": 48}, "group=48", "16, 32, 64, 128"),
        ({"group": 32.0}, "group=32.0", "16, 32, 64, 128"),
        ({"meta": "fp4"}, "meta='fp4'", "fp32, fp16, bf16, fp8"),
        ({"group": 0}, "group=0", "16, 32, 64, 128"),
        ({"span": "layer"}, "span, reorder, clip", 'use axis="token"'),
        ({"residual": 0}, "0", "1 or more"),
        ({"residual": 1.5}, "1.5", "whole number"),
        ({"residual": 100}, "residual=100 is not a multiple of group=32", "use 32 or 128"),
        ({"residual": 64, "group": 128}, "residual=64 is not a multiple of group=128", "use 128"),
        ({"residual": 64, "unit": 48}, "unit=48 does not divide residual=64", "a unit that does"),
        ({"residual": 64, "unit": 16}, "unit=16 is not a multiple of group=32", "use 32"),
    ],
)
def test_a_bad_format_is_refused_by_what_would_be_right(fields, wrong, right):
    with pytest.raises(RecipeError) as refused:
        Packed(**{"bits": 2, "axis": "channel", "group": 32, "residual": 32} | fields)
    assert wrong in str(refused.value)
    assert right in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"span": "row"}, "span='row' is not one of head, layer"),
        ({"clip": 0.0}, "clip=0.0 must be above 0 and at most 1, or calibrated: group or layer"),
        ({"clip": 1.01}, "clip=1.01 must be above 0"),
        ({"clip": True}, "clip=True must be above 0"),
        ({"clip": "head"}, "clip='head' is not one of group, layer"),
        ({"static": True, "clip": 0.9}, "clip=0.9 clips a token's own range; leave it out"),
        ({"rotation": "group", "smooth": True}, 'rotation="group" stands alone'),
        ({"rotation": "head", "clip": 0.9}, 'rotation="head" stands alone'),
        ({"rotation": "all"}, "rotation='all' is not one of none, group, head"),
    ],
)
def test_channels_that_cannot_be_regrouped_are_refused(fields, says):
    with pytest.raises(RecipeError) as refused:
        Encoding(2, "token", **fields)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Packed(2, "token", pre_rope="yes"), "pre_rope='yes' must be True or False"),
        (lambda: Store(calibration="x"), "calibration='x': no format of this store needs one"),
        (lambda: Store(Packed(2, "token"), None, "x"), "no format of this store needs one"),
        (lambda: Packed(2, "token", unit=1.5), "unit=1.5 must be a whole number or None"),
        (lambda: Store(keys=2), "keys=2 must be a Format or None"),
        (lambda: Encoding(2, "token", smooth=1), "smooth=1 must be True or False"),
        (lambda: Encoding(2, "token", clip=None), "clip=None must be above 0"),
        (lambda: Protect(outliers=64), "outliers=64 must be an Outliers or None"),
        (lambda: Budget(5, recent="1"), "recent='1' must be a number"),
        (lambda: Budget(5, layers=[1, 2]), r"layers=[1, 2] must be a string or a tuple"),
        (lambda: Budget(5, layers=(1.0, float("nan"))), "must be one weight a layer, 0 or more"),
        (lambda: Keep(0.5), "budget=0.5 must be a Budget"),
        (lambda: Keep(Budget(5), shared="no"), "shared='no' must be True or False"),
        (lambda: Mass("a"), "damping='a' must be a number"),
        (lambda: Observation(2.5), "window=2.5 must be a whole number"),
        (lambda: Noisy(tau_end=float("nan")), "tau_end=nan must be a finite number"),
        (lambda: Mass(float("inf")), "damping=inf must be a finite number"),
        (lambda: Noisy(steps=0.5), "steps=0.5 must be a whole number"),
        (lambda: Keep(Budget(5), when=["step"]), "when=['step'] is not one of step, "),
        (lambda: Keep(Budget(5), query_heads={}), "query_heads={} is not one of sum, "),
        (lambda: Keep(Budget(5), positions=[]), "positions=[] is not one of original, "),
        (
            lambda: Recall(Pages(), query_heads=["mean"]),
            "query_heads=['mean'] is not one of mean, ",
        ),
        (lambda: Tier(["host"]), "kind=['host'] must be a string"),
        (lambda: Recall(Pages(), tier="host"), "tier='host' must be a Tier or None"),
        (lambda: Tier("file", folder=3), "folder=3 must be a string or None"),
        (lambda: Recipe("kivi"), "keep='kivi' must be a Keep or None"),
        (lambda: Recipe(store=Packed(2, "token")), "must be a Store"),
        (lambda: Recipe(recall=Pages()), "must be a Recall or None"),
        (lambda: Recipe(protect=4), "protect=4 must be a Protect"),
    ],
)
def test_a_part_of_a_wrong_type_is_refused(build, says):
    with pytest.raises(RecipeError) as refused:
        build()
    assert says in str(refused.value)


def test_a_score_that_repeats_the_prompt_says_what_is_repeated():
    class Repeated(Scorer):
        kind = "repeated"
        repeats = True

    with pytest.raises(RecipeError, match=r"'repeated' .* derive it from Reconstruction"):
        Keep(Budget(5), Repeated(), when="prompt")


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"sinks": -1}, "sinks=-1"),
        ({"sinks": 1.5}, "sinks=1.5"),
        ({"sinks": True}, "sinks=True"),
        ({"exact_recent": -3}, "exact_recent=-3"),
        ({"exact_recent": (0, -3)}, "exact_recent=-3"),
        ({"exact_recent": "8"}, "exact_recent='8'"),
        ({"exact_recent": (1, 2, 3)}, "exact_recent=(1, 2, 3)"),
        ({"exact_recent": (1,)}, "exact_recent=(1,)"),
    ],
)
def test_bad_protection_is_refused(fields, wrong):
    with pytest.raises(RecipeError) as refused:
        Protect(**fields)
    assert wrong in str(refused.value)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: Recall("pages"),
            "index='pages' is not an index; use Clusters, Pages, PartialKeys or TopK",
        ),
        (lambda: Recall(Pages(), tokens=0), "budget tokens=0 must be a whole number, 1 or"),
        (lambda: Recall(Pages(), tokens=0.5), "tokens=0.5 must be a whole number, 1 or more"),
        (lambda: Recall(Pages(), full_layers=-1), "full_layers=-1 must be a whole number, 0 or"),
        (
            lambda: Recall(Pages(), query_heads="sum"),
            "query_heads='sum' is not one of mean, max",
        ),
        (lambda: Tier("x"), "kind='x' is not one of host, file; leave the tier out to keep every"),
        (lambda: Pages(0), "page=0 must be a whole number, 1 or more"),
        (lambda: Clusters(size=0), "size=0 must be a whole number, 1 or more"),
        (lambda: Clusters(seed=-1), "seed=-1 must be a whole number, 0 or more"),
        (lambda: Clusters(size=1 << 31), "size is larger than 2,147,483,647; use a smaller one"),
        (lambda: Clusters(seed=1 << 64), "seed is larger than 18,446,744,073,709,551,615"),
        (lambda: Clusters(distance="dot"), "distance='dot' is not one of cosine, l2, inner"),
        (lambda: Clusters(block=2), "block_clusters=8 is more than the block=2 tokens have room"),
    ],
)
def test_bad_recall_is_refused(build, says):
    with pytest.raises(RecipeError) as refused:
        build()
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("index", "protect", "least"),
    [
        (Clusters(), Protect(16), 17),
        (Pages(), Protect(16, 64), 96),
        (TopK(), Protect(0, (3, 9)), 10),
    ],
)
def test_a_recall_must_find_something_beside_protected_tokens(index, protect, least):
    with pytest.raises(RecipeError, match=f"use {least} or more"):
        Recipe(recall=Recall(index, least - 1), protect=protect)
    Recipe(recall=Recall(index, least), protect=protect)


def test_recall_does_not_combine_with_a_keep_at_every_step():
    with pytest.raises(RecipeError, match="leave one of the two out"):
        Recipe(keep=Keep(Budget(tokens=8)), recall=Recall(Pages()))


def test_a_budget_is_what_a_step_recalls():
    quest = resolve("quest")
    assert quest.with_budget(256).recall.tokens == 256
    assert quest.with_budget(0.25, 2050).recall.tokens == 512
    with pytest.raises(RecipeError, match=r"not budget=0.5 of a prompt .*; give a whole number"):
        quest.with_budget(0.5)
    for wrong in (0, 0.0, 1.5):
        with pytest.raises(RecipeError, match=f"={wrong} must"):
            quest.with_budget(wrong, 2050)


def test_who_has_a_budget():
    assert [resolve(name).budgeted for name in ("h2o", "quest", "kivi", "full")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert resolve("kivi").with_budget(0.5) == resolve("kivi")


def test_keep_and_a_packed_store_do_not_combine():
    with pytest.raises(RecipeError, match="combine keep with an exact store") as refused:
        Recipe(keep=Keep(Budget(tokens=8)), store=Store(Packed(2, "token"), None))
    assert "cannot leave their group alone" in str(refused.value)


@pytest.mark.parametrize(("sinks", "recent"), [(8, 0), (4, 4), (0, (2, 9))])
def test_a_budget_must_leave_room_beside_protected_tokens(sinks, recent):
    protect = Protect(sinks, recent)
    least = sinks + max(protect.exact_recents)
    with pytest.raises(RecipeError, match=f"use {least + 1} or more"):
        Recipe(keep=Keep(Budget(tokens=least)), protect=protect)
    Recipe(keep=Keep(Budget(tokens=least + 1)), protect=protect)


def test_recipes_are_frozen_plain_data():
    recipe = resolve("kivi")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "mine"
    assert recipe == resolve("kivi")
    assert hash(recipe) == hash(resolve("kivi"))


# --- problems with a model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "head_dim", "fits"),
    [
        (128, 64, "use 16 or 32 or 64"),
        (64, 96, "use 16 or 32"),
        (32, 80, "use 16"),
        (32, 40, "no group fits; store values exact"),
    ],
)
def test_a_group_that_does_not_divide_names_those_that_do(group, head_dim, fits):
    (problem,) = resolve(f"kivi:group={group}").problems(geometry(head_dim))
    assert problem == f"values: group={group} does not divide head_dim={head_dim}; {fits}"


@pytest.mark.parametrize(
    ("reorder", "group", "heads", "says"),
    [
        (False, 64, 2, None),  # one group over both heads
        (False, 64, 3, "does not divide the layer's channels=96; use 16 or 32"),
        (True, 64, 3, None),  # unequal groups need not divide
        (True, 128, 3, "does not divide the layer's channels=96"),
    ],
)
def test_a_group_over_all_heads_must_fit_the_layer(reorder, group, heads, says):
    fmt = Packed(2, "token", group, span="layer", reorder=reorder)
    problems = Recipe(store=Store(fmt)).problems(geometry(32, kv_heads=heads))
    assert (not problems) if says is None else says in problems[0]


def test_keys_per_channel_fit_every_head_dim():
    keys = Recipe(store=Store(keys=Packed(2, "channel", 128, residual=128)))
    assert all(keys.problems(geometry(d)) == [] for d in (40, 64, 80, 96, 256))


def test_all_problems_are_raised_together():
    recipe = resolve("rtn:group=64")
    with pytest.raises(IncompatibleRecipe) as refused:
        recipe.check(geometry(80))
    assert refused.value.problems == recipe.problems(geometry(80))
    assert [p.split(":")[0] for p in refused.value.problems] == ["keys", "values"]
    assert all(p in str(refused.value) for p in refused.value.problems)
    assert "'rtn:group=64'" in str(refused.value)


def test_a_recipe_that_fits_passes():
    for name in RECIPES:
        resolve(name).check(geometry(64))


# --- bytes ---------------------------------------------------------------------------------------


def test_bytes_of_an_exact_cache_are_those_of_its_tokens():
    g = geometry(64)
    assert resolve("full").nbytes(100, g, batch=3) == 3 * 100 * g.token_nbytes()
    assert g.token_nbytes() == 2 * 2 * 2 * 64 * 2  # K and V, layers, heads, head_dim, bf16


def test_bytes_of_a_budget_stop_growing():
    g = geometry(64)
    at_most = resolve("window:tokens=50")
    assert at_most.nbytes(20, g) == 20 * g.token_nbytes()
    assert at_most.nbytes(50, g) == at_most.nbytes(5000, g) == 50 * g.token_nbytes()
    half = Recipe(keep=Keep(Budget(fraction=0.5)))
    assert half.nbytes(100, g) == 50 * g.token_nbytes()


def test_bytes_of_sinks_and_of_each_rows_first_token():
    g = geometry(64)
    streaming = resolve("streaming:tokens=50,sinks=4")
    assert streaming.nbytes(100, g, batch=3) == 3 * (50 * g.token_nbytes() + 2 * 8)
