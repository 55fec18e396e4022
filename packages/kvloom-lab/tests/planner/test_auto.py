"""`kvloom_lab.auto`: the best recipe within a bound, and the figures that decide."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvloom
import kvloom_lab
import tiny
from kvloom.errors import InputError
from kvloom.hf import compat
from kvloom.hf.layer_facts import identity
from kvloom.recipe import Recipe, Tuned
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from kvloom_lab.planner import read_model
from kvloom_lab.planner.choice import EVIDENCE
from kvloom_lab.planner.step import CHUNK, CacheBytes
from kvloom_lab.workload.files import store_recipe

CONTEXT = 2048
RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def model():
    """A model of each test's own, as some change it."""
    return tiny.llama(max_position_embeddings=4096, head_dim=64)


def share(model, recipe):
    geometry = compat.geometry(model)
    return resolve(recipe).nbytes(CONTEXT, geometry) / Recipe().nbytes(CONTEXT, geometry)


def store(model, spec, kl=0.01, bound="share=0.2"):
    """Store a recipe as if it had been tuned for the model."""
    weights = identity(model)["weights"]
    tuned = Tuned(weights, "0" * 64, bound, CONTEXT, 3, 64, 0, kl, kl, kl, 1, 1, 0.2)
    return store_recipe(replace(resolve(spec), tuned=tuned))


def auto(model, **bound):
    return kvloom_lab.auto(model, context=CONTEXT, **bound)


@pytest.mark.parametrize("bound", [1.0, *(one.recipe for one in EVIDENCE[1:]), 0.25])
def test_no_recipe_that_fits_has_better_published_figures(model, bound):
    bound = share(model, bound) if isinstance(bound, str) else bound
    found = auto(model, share=bound)
    fitting = [one for one in EVIDENCE if share(model, one.recipe) <= bound]
    assert found.recipe.name == min(fitting, key=lambda one: one.kl).recipe
    assert found.nbytes == resolve(found.recipe).nbytes(CONTEXT, compat.geometry(model))
    assert found.share == pytest.approx(share(model, found.recipe))
    kvloom.attach(model, found.recipe)
    kvloom.detach(model)


def test_what_was_chosen_is_said(model):
    said = str(auto(model, share=share(model, "near-lossless")))
    assert said.startswith("near-lossless: ")
    assert "after 2,048 tokens, batch 1" in said
    assert f"{EVIDENCE[1].kl:.2g} nats" in said
    assert str(auto(model, share=1.0)).endswith("The exact cache fits.")
    evicts = str(auto(model, share=share(model, "small")))
    assert evicts.endswith("It evicts tokens: facts in them are lost.")


def test_memory_holds_weights_activations_and_cache(model):
    """The bound that a plan states for a recipe chooses it; one byte less does not."""
    planned = kvloom_lab.plan(
        model.config, ["near-lossless"], context=CONTEXT, batch=3, memory=1 << 40
    )
    peak = planned.rows[0].peak_bytes
    found = auto(model, memory=peak, batch=3)
    assert found.recipe.name == "near-lossless"
    assert auto(model, memory=peak - 1, batch=3).recipe.name != "near-lossless"


def test_if_no_prompt_fits_at_once_it_says_so(model):
    facts = read_model(model.config)
    cache = CacheBytes(resolve("near-lossless"), facts).chunked_nbytes(CONTEXT, 1)
    found = auto(model, memory=facts.weights.nbytes + cache + facts.activations.nbytes(CHUNK, 1))
    assert found.recipe.name == "near-lossless"
    assert "give prefill_chunk_size=256 to generate()" in found.why


def test_if_nothing_fits_the_nearest_in_chunks_keeps_every_token(model):
    """A score of the prompt sees its first chunk alone."""
    with pytest.raises(InputError) as error:
        auto(model, memory=read_model(model.config).weights.nbytes + (3 << 20))
    named = re.search(r"the nearest is (\S+), with which [\d,]+ tokens fit", str(error.value))
    assert not resolve(named[1]).keeps_by_score


def test_the_dtype_of_the_weights_counts(model):
    exact = auto(model, share=1.0).nbytes
    assert auto(model.to(torch.bfloat16), share=1.0).nbytes * 2 == exact


def test_a_tuned_recipe_of_about_the_same_bytes_is_taken(model):
    path = store(model, "kivi-4", kl=0.02)
    store(model, "turbo:bits=4", kl=0.05, bound="share=0.19")
    store(model, "kivi:bits=2", kl=0.001, bound="share=0.1")  # of too few bytes
    bound = share(model, "near-lossless")
    found = auto(model, share=bound)
    assert found.recipe.name == str(path)
    assert "tuned for this model at 2,048 tokens (share=0.2)" in found.why
    assert "evicts" not in found.why
    assert auto(model, share=1.0).recipe.name == "full"


def test_a_tuned_recipe_that_evicts_says_so(model):
    store(model, "snapkv:fraction=0.2")
    found = auto(model, share=share(model, "snapkv:fraction=0.2"))
    assert found.why.endswith("It evicts tokens: facts in them are lost.")


def test_a_tuned_recipe_that_repeats_the_prompt_says_so(model):
    store(model, "kvzip:fraction=0.2")
    found = auto(model, share=share(model, "kvzip:fraction=0.2"))
    assert "A prompt takes several times as long" in found.why


def test_another_models_tuned_recipe_is_not_taken(model):
    store(model, "kivi-4")
    bound = share(model, "near-lossless")
    assert auto(model, share=bound).recipe.name != "near-lossless"
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert auto(model, share=bound).recipe.name == "near-lossless"


def test_a_damaged_stored_recipe_is_named(model):
    path = store(model, "kivi-4")
    path.write_text("nonsense")
    with pytest.raises(InputError, match=r"is damaged: .*; remove it"):
        auto(model, share=0.5)


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ({}, "give either memory, in bytes, or a share"),
        ({"memory": 1 << 30, "share": 0.5}, "give either memory, in bytes, or a share"),
        ({"share": 0.0}, "share=0.0 must be a number above 0"),
        ({"share": 1.5}, "share=1.5 must be a number above 0 and at most 1"),
        ({"share": "0.2"}, "share='0.2' must be a number above 0 and at most 1"),
        (
            {"share": 0.01},
            "no recipe fits into share=0.01 at 2,048 tokens and batch 1",
        ),
        ({"memory": 10}, "the weights of .* take"),
    ],
)
def test_a_bound_that_is_none_or_that_nothing_meets(model, bound, said):
    with pytest.raises(InputError, match=said):
        auto(model, **bound)


def test_memory_for_the_weights_alone_names_what_fits(model):
    weights = read_model(model.config).weights.nbytes
    with pytest.raises(InputError, match=r"with which [0-9,]+ tokens fit"):
        auto(model, memory=weights + 1000)


def test_the_figures_are_the_published_ones():
    figures = {
        (row["task"], row["recipe"]): row["scores"]
        for run in ("smollm2-2k", "smollm2-2k-mixed")  # the second has more texts
        for file in RESULTS.glob(f"*/evidence_{run}.json")
        for row in json.loads(file.read_text())["figures"]
    }
    row = {"small:fraction=0.666": "small at 0.2"}
    smollm2 = Geometry(layers=30, q_heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16)
    for recipe in row:
        size = resolve(recipe).nbytes(CONTEXT, smollm2) / Recipe().nbytes(CONTEXT, smollm2)
        assert 0.199 < size <= 0.2
    for one in EVIDENCE:
        name = row.get(one.recipe, one.recipe)
        kl = figures["perplexity", name]["kl_mean"]["mean"]
        assert float(f"{kl:.3g}") == one.kl, one.recipe
        if one.needles is not None:
            assert round(figures["niah", name]["correct"]["mean"], 2) == one.needles, one.recipe
    assert sorted(EVIDENCE, key=lambda one: one.kl) == list(EVIDENCE)
