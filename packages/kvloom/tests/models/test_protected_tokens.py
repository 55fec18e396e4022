"""Tokens of the prompt that stay by their ids, such as an image's, by their place or their role."""

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
SPANS = ((2, 6), (-15, -11), (-400, 1))  # the last one is cut
SYSTEM = kvloom.Role((7, 8), (9,))
RECIPES = [
    "snapkv:tokens=24,window=8", "h2o:tokens=24", "kvzip:tokens=24,recent=8", "keyformer:tokens=24",
    "snapkv:tokens=24,window=8,head_share=0.2",
    "kvzip:tokens=24,recent=8,head_share=0.2,layers=joint",
    "small:recent=8,group=16,residual=16,fraction=0.3",
    "small:recent=8,group=16,residual=16,fraction=0.3,block=16",
    "rotated:block=16,fraction=0.3,recent=8,head_share=1",
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
    waits = read(model, protecting("h2o:tokens=24,compress_after=64", ids=ids), prompt, steps=6)
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
    recipe = protecting("h2o:tokens=24,compress_after=64", ids=(5,))
    cache = kvloom.Cache(model, recipe)
    model(**batch, past_key_values=cache)
    predicted = recipe.nbytes(61, cache.geometry, batch=3)
    assert cache.nbytes == predicted + cache.hidden.nbytes


@by_reference
def test_embeddings_are_refused_by_name():
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, protecting("h2o:tokens=24", ids=(5,)))
    batch = zoo.batch(padding=(0, 0, 0))
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with pytest.raises(CacheMisuse, match="reads token ids, not inputs_embeds; give input_ids"):
        model(inputs_embeds=embeds, past_key_values=cache)
    assert cache.get_seq_length() == 0
    model(**batch, past_key_values=cache)
    model(inputs_embeds=embeds[:, :1], past_key_values=cache)  # the prompt is scored


@by_reference
@pytest.mark.parametrize(
    ("recipe", "rule", "says"),
    [
        ("kivi", {"ids": (5,)}, "use them with a recipe that has a score"),
        ("streaming", {"ids": (5,)}, "use them with a recipe that has a score"),
        ("h2o", {"ids": (5,), "ids_except": (6,)}, "give one of them"),
        ("h2o", {"ids": [5]}, r"ids=\[5\] must be a tuple"),
        ("kivi", {"spans": ((0, 5),)}, "use them with a recipe that has a score"),
        ("streaming", {"role": SYSTEM}, "use them with a recipe that has a score"),
        ("h2o", {"spans": (0, 5)}, r"spans=\(0, 5\) must be a tuple, each item a tuple"),
        ("h2o", {"spans": ((0, 5, 9),)}, r"span \(0, 5, 9\) must be \(first, end\)"),
        ("h2o", {"spans": ((5, 5),)}, r"span \(5, 5\) has no tokens"),
        ("h2o", {"spans": ((-3, -9),)}, r"span \(-3, -9\) has no tokens"),
        ("h2o", {"spans": ((-3, 0),)}, r"span \(-3, 0\) has no tokens"),
        ("h2o", {"role": "system"}, "role='system' must be a Role or None"),
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
    for rule in ({"ids": (5, 190)}, {"spans": ((0, 9), (-40, -20)), "role": SYSTEM}):
        recipe = protecting("snapkv", **rule)
        assert kvloom.Recipe.from_toml(recipe.to_toml()) == recipe


# places and roles


def of_spans(batch, spans=SPANS):
    """The tokens of spans, bool [B, N]."""
    marked = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    for row, mask in zip(marked, batch["attention_mask"], strict=True):
        for first, end in spans:
            row[mask.nonzero()[:, 0][first:end]] = True
    return marked


def system_prompts():
    """A batch with messages of SYSTEM, of 7, 9 and 6 tokens, and where they are, bool [B, N]."""
    batch = zoo.batch(tokens=154)
    ids = batch["input_ids"] = batch["input_ids"].clone()
    ids[(ids == 9) | (ids == 7)] = 10
    marked = torch.zeros_like(ids, dtype=torch.bool)
    for row, (first, end) in enumerate([(5, 12), (17, 26), (44, 50)]):
        ids[row, first : first + 2], ids[row, end - 1] = torch.tensor([7, 8]), 9
        marked[row, first:end] = True
    ids[2, :40] = 9  # the padding of some tokenizers is the end of a message
    return batch, marked


@pytest.mark.parametrize("by", ["spans", "role"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_spans_and_messages_stay_within_the_budget(recipe, by):
    model, (batch, marked) = zoo.build("llama-gqa"), system_prompts()
    if by == "spans":
        marked = of_spans(batch)
    rule = {"spans": SPANS} if by == "spans" else {"role": SYSTEM}
    steps = 20 if "h2o" in recipe or "evict" in recipe else 2
    plain, cache = (read(model, x, batch, steps) for x in (recipe, protecting(recipe, **rule)))
    at = marked[:, None].expand(-1, 2, -1)
    assert kept(cache)[..., :154][:, at].all()
    assert not kept(plain)[..., :154][:, at].all()
    assert cache.nbytes == plain.nbytes
    one = {name: x[:1] for name, x in batch.items()}
    alone = kvloom.Cache(model, protecting(recipe, **rule))
    model(**one, past_key_values=alone)
    stored = sum(layer.nbytes for layer in probe.layers(alone))
    assert stored == alone.recipe.nbytes(154, alone.geometry)


def test_a_message_that_does_not_end_is_of_its_role_up_to_the_prompts_end():
    model, batch = zoo.build("llama-gqa"), zoo.batch(1, 61, (0,))
    batch["input_ids"][batch["input_ids"] == 9] = 10
    batch["input_ids"][0, 44:46] = torch.tensor([7, 8])
    cache = read(model, protecting("snapkv:tokens=24,window=4", role=SYSTEM), batch)
    assert kept(cache)[..., 44:].all()


def test_spans_and_ids_and_messages_add_up():
    model, (batch, marked) = zoo.build("llama-gqa"), system_prompts()
    id = int(batch["input_ids"][0, 30])
    recipe = protecting("snapkv:tokens=40,window=4", spans=SPANS, role=SYSTEM, ids=(id,))
    wanted = marked | of_spans(batch) | (batch["input_ids"] == id)
    cache = read(model, recipe, batch)
    assert kept(cache)[
        :, (wanted & batch["attention_mask"].bool())[:, None].expand(-1, 2, -1)
    ].all()


@pytest.mark.parametrize("recipe", ["h2o:tokens=24", "evict:score=observation,tokens=24,window=4"])
def test_of_a_prompt_in_chunks_the_first_one_has_the_tokens(recipe):
    model, batch = zoo.build("llama-gqa"), zoo.batch(1, 61, (0,))
    cache = kvloom.Cache(model, protecting(recipe, spans=((2, 6), (-4, -2))))
    probe.observe(cache)
    for chunk in batch["input_ids"].split(30, dim=1):
        model(chunk, past_key_values=cache)
    held = kept(cache)
    assert held[..., [2, 3, 4, 5, 26, 27]].all()
    assert (held.sum(dim=-1) == 24).all()


def test_a_prompt_that_waits_keeps_its_places():
    """For `start`, whose prompt is all tokens until then, and for the crop of a draft."""
    model, batch = zoo.build("llama-gqa"), zoo.batch(1, 61, (0,))
    rule = {"spans": ((20, 24), (-10, -9))}
    waits = read(model, protecting("h2o:tokens=24,compress_after=64", **rule), batch, steps=6)
    assert kept(waits)[..., [20, 21, 22, 23, 55]].all()  # 65 tokens were the prompt
    for recipe in ("h2o:tokens=24", "kvzip:tokens=24,recent=8"):
        cache = kvloom.Cache(model, protecting(recipe, **rule))
        probe.observe(cache)
        for layer in probe.layers(cache):
            probe.record(layer, True)
        model(**batch, past_key_values=cache)
        cache.crop(0)
        assert kept(cache)[..., [20, 21, 22, 23, 51]].all()
        assert (kept(cache).sum(dim=-1) == 24).all()


@pytest.mark.parametrize(
    ("tokens", "spans"), [(16, ((0, 400),)), (257, ((4, 8), (-40, -36)))], ids=["no block", "block"]
)
def test_blocks_after_the_prompt_leave_its_places(tokens, spans):
    model, batch = zoo.build("llama-gqa"), zoo.batch(2, tokens, (0, 3))
    recipe = "small:recent=8,group=16,residual=16,fraction=0.3,block=16"
    plain, held = (
        kept(read(model, x, batch, steps=80)) for x in (recipe, protecting(recipe, spans=spans))
    )
    for row, marked in enumerate(of_spans(batch, spans)):
        assert held[:, row, :, :tokens][..., marked].all()
        assert tokens == 16 or not plain[:, row, :, :tokens][..., marked].all()
    assert not held[..., tokens:].all()


@by_reference
def test_spans_need_no_ids_and_roles_do():
    model = zoo.build("llama-gqa")
    embeds = model.get_input_embeddings()(zoo.batch()["input_ids"][:1])
    cache = kvloom.Cache(model, protecting("snapkv:tokens=24,window=8", spans=((3, 9),)))
    probe.observe(cache)
    model(inputs_embeds=embeds, past_key_values=cache)
    assert kept(cache)[..., 3:9].all()
    with pytest.raises(CacheMisuse, match="give input_ids"):
        model(
            inputs_embeds=embeds,
            past_key_values=kvloom.Cache(model, protecting("h2o", role=SYSTEM)),
        )
