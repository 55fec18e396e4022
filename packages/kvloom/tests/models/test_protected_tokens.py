"""Tokens of the prompt that stay by their ids, such as those of an image."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo

import kvloom
import probe
from backends import by_reference
from kvloom.errors import CacheMisuse, RecipeError
from kvloom.keep import Mass
from kvloom.recipe.resolve import resolve

IMAGE = (zoo.IMAGE_TOKEN,)
RECIPES = [
    "snapkv:tokens=24,window=8", "h2o:tokens=24", "kvzip:tokens=24,recent=8", "keyformer:tokens=24",
    "snapkv:tokens=24,window=8,heads=0.2", "kvzip:tokens=24,recent=8,heads=0.2,layers=joint",
    "small:recent=8,group=16,residual=16,fraction=0.1",
    "evict:score=observation,tokens=24,window=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def protecting(spelled, **rule):
    recipe = resolve(spelled)
    return replace(recipe, protect=replace(recipe.protect, **rule))


def kept(cache):
    """Which tokens every head of each layer holds: bool [L, B, Hk, seen]."""
    held = []
    for layer in probe.layers(cache):
        index = layer.logical()
        mask = torch.zeros(*index.shape[:2], layer.seen + 1, dtype=torch.bool)
        held.append(mask.scatter_(2, index.masked_fill(index < 0, layer.seen), True)[..., :-1])
    return torch.stack(held)


def read(model, recipe, prompt, steps=0):
    cache = kvloom.Cache(model, recipe)
    probe.observe(cache)
    model(**prompt, past_key_values=cache)
    for token in range(steps):
        rows = len(prompt["input_ids"])
        mask = torch.ones(rows, cache.get_seq_length() + 1, dtype=torch.long)
        mask[:, : prompt["attention_mask"].shape[1]] = prompt["attention_mask"]
        ids = torch.full((rows, 1), 3 + token)
        model(ids, attention_mask=mask, past_key_values=cache)
    return cache


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_the_tokens_of_an_image_stay_within_the_budget(name, recipe):
    model = zoo.build_with_images(name)
    prompt = zoo.image_prompt(model, 90, 60)
    image = prompt["input_ids"][0] == zoo.IMAGE_TOKEN
    steps = 20 if "h2o" in recipe or "evict" in recipe else 2
    plain = read(model, recipe, prompt, steps)
    cache = read(model, protecting(recipe, ids=IMAGE), prompt, steps)
    assert kept(cache)[..., :154][..., image].all()
    assert not kept(plain)[..., :154][..., image].all()
    assert cache.nbytes == plain.nbytes
    unobserved = kvloom.Cache(model, protecting(recipe, ids=IMAGE))
    model(**prompt, past_key_values=unobserved)
    stored = sum(layer.nbytes for layer in probe.layers(unobserved))
    assert stored == unobserved.recipe.nbytes(154, unobserved.geometry)


def test_a_rule_may_name_the_tokens_that_scores_decide_about():
    """Of an image, so that text stays."""
    model = zoo.build_with_images("llava")
    prompt = zoo.image_prompt(model, 6, 6)
    image = prompt["input_ids"][0] == zoo.IMAGE_TOKEN
    cache = read(model, protecting("snapkv:tokens=14,window=2", ids_except=IMAGE), prompt)
    assert kept(cache)[..., ~image].all()
    assert (kept(cache)[..., image].sum(dim=-1) == 2).all()


@pytest.mark.parametrize("recipe", ["snapkv:tokens=16,window=8", "h2o:tokens=16"])
def test_sinks_and_padding_come_before_the_rule(recipe):
    """More tokens have the ids than the budget has room for."""
    model, batch = zoo.build("llama-gqa"), zoo.batch()
    cache = read(model, protecting(recipe, ids=tuple(range(199)), sinks=4), batch, steps=3)
    real = batch["attention_mask"].bool()
    held = kept(cache)
    assert (held.sum(dim=-1) == (16 if "h2o" in recipe else 19)).all()
    for row, mask in enumerate(real):
        start = int(mask.int().argmax())
        assert held[:, row, :, start : start + 4].all()
        assert not held[:, row, :, :start].any()


def test_a_prompt_that_waits_keeps_its_ids():
    """For `start`, and for the crop of a draft."""
    model = zoo.build("llama-gqa")
    prompt = {x: y[:1] for x, y in zoo.batch(1, 61, (0,)).items()}
    ids = tuple(prompt["input_ids"][0, 20:24].tolist())
    wanted = torch.isin(prompt["input_ids"][0], torch.tensor(ids))
    waits = read(model, protecting("h2o:tokens=24,start=64", ids=ids), prompt, steps=6)
    assert kept(waits)[..., :61][..., wanted].all()
    for recipe in ("h2o:tokens=24", "kvzip:tokens=24,recent=8"):
        cache = kvloom.Cache(model, protecting(recipe, ids=ids))
        probe.observe(cache)
        for layer in probe.layers(cache):
            probe.record(layer, True)
        model(**prompt, past_key_values=cache)
        cache.crop(0)
        assert kept(cache)[..., wanted].all()
        assert (kept(cache).sum(dim=-1) == 24).all()


def test_the_bytes_of_a_prompt_that_waits_are_predicted():
    model, batch = zoo.build("llama-gqa"), zoo.batch()
    recipe = protecting("h2o:tokens=24,start=64", ids=(5,))
    cache = kvloom.Cache(model, recipe)
    model(**batch, past_key_values=cache)
    assert cache.nbytes == recipe.nbytes(61, cache.geometry, batch=3)


@by_reference
def test_embeddings_are_refused_by_name():
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, protecting("h2o:tokens=24", ids=(5,)))
    embeds = model.get_input_embeddings()(zoo.batch()["input_ids"])
    with pytest.raises(CacheMisuse, match="reads token ids, not inputs_embeds; give input_ids"):
        model(inputs_embeds=embeds, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(**zoo.batch(), past_key_values=cache)
    model(inputs_embeds=embeds[:, :1], past_key_values=cache)  # the prompt is scored


@by_reference
@pytest.mark.parametrize(
    ("recipe", "rule", "says"),
    [
        ("kivi", {"ids": (5,)}, "combine them with a keep by score"),
        ("streaming", {"ids": (5,)}, "combine them with a keep by score"),
        ("rotated:block=64,fraction=0.5", {"ids_except": (5,)}, "not with when=block"),
        ("h2o", {"ids": (5,), "ids_except": (6,)}, "give one of them"),
        ("h2o", {"ids": [5]}, r"ids=\[5\] must be a tuple"),
    ],
)
def test_rules_that_cannot_work_are_refused(recipe, rule, says):
    with pytest.raises(RecipeError, match=says):
        protecting(recipe, **rule)


@by_reference
def test_budgets_by_variance_leave_protected_tokens_out():
    model = zoo.build("llama-gqa")
    budget = kvloom.Budget(24, recent=8, layers="variance")
    recipe = kvloom.Recipe(kvloom.Keep(budget, Mass(), when="prompt"))
    cache = read(model, replace(recipe, protect=kvloom.Protect(ids=(5, 9))), zoo.batch())
    assert kept(cache).sum(dim=-1).float().mean() == 24


@by_reference
def test_a_rule_is_part_of_a_recipe_as_text():
    recipe = protecting("snapkv", ids=(5, 190))
    assert kvloom.Recipe.from_toml(recipe.to_toml()) == recipe
