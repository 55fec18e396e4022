"""With a budget above all tokens, every recipe gives the tokens of plain transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.hf import compat
from kvloom.keep import POSITIONS
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom.store import Store

KEEPERS = [name for name in RECIPES if resolve(name).keep is not None]
MODELS = (
    "llama-gqa",
    "gpt2",
    "gpt-neox",
    "gemma2",
    "gpt-oss",
    "gemma4-shared",
    "gptj",
    "bloom",
    "falcon-gqa",
)


@pytest.fixture(scope="module", params=MODELS)
def plain(request):
    """A model's name, a padded batch, and what plain transformers makes of it by beams."""
    model, inputs = zoo.build(request.param), zoo.batch()
    return request.param, inputs, {beams: generated(model, inputs, beams) for beams in (1, 4)}


def generated(model, inputs, beams, **more):
    return model.generate(
        **inputs, max_new_tokens=10, do_sample=False, num_beams=beams, use_cache=True, **more
    )


@pytest.mark.sample
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", KEEPERS)
def test_nothing_is_lost_within_the_budget(plain, name, positions):
    model_name, inputs, want = plain
    if (model_name, positions) == ("gpt2", "renumbered") and "pyramid" in name:
        pytest.skip("refused: learned positions are one number for all layers")
    model = zoo.build(model_name)
    recipe = resolve(name).with_budget(72)
    alike = positions == "renumbered" or compat.geometry(model).alibi
    if recipe.keep.budget.head_share is not None and alike:  # heads with other tokens are refused
        recipe = resolve(f"{name}:head_share=1").with_budget(72)
    fit = None if positions == "renumbered" else recipe.keep.fit  # together, they are refused
    keep = replace(recipe.keep, positions=positions, fit=fit)
    recipe = replace(recipe, keep=keep, store=Store())
    for beams, tokens in want.items():
        cache = kvloom.Cache(model, recipe)
        assert torch.equal(generated(model, inputs, beams, past_key_values=cache), tokens)


@by_reference
def test_every_recipe_that_drops_is_among_them():
    assert {"h2o", "keyformer", "snapkv", "pyramidkv", "minikv", "streaming"} <= set(KEEPERS)
