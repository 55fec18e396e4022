"""Recall under whole models: reading everything is plain transformers; little is not far off."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo

import kvloom
import probe
from backends import by_reference
from beams import assert_rows_follow_beams
from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe.resolve import resolve

NAMES = [
    "llama-gqa",
    "gemma2",
    "gpt-oss",
    "gemma4-shared",
    "gptj",
    "mpt",
    "falcon-gqa",
    "bloom",
    "opt",
    *({"deepseek-v3"} & {*zoo.CONFIGS}),  # older transformers cache no latents
]
GREEDY = {"max_new_tokens": 24, "do_sample": False}


@pytest.mark.sample
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("recipe", ["clusterkv", "quest", "infinigen", "topk"])
@pytest.mark.parametrize("beams", [1, 4])
def test_with_a_budget_for_all_tokens_are_those_of_plain_transformers(name, recipe, beams):
    model = zoo.build(name)
    expected = model.generate(**zoo.batch(), **GREEDY, num_beams=beams)
    kvloom.attach(model, f"{recipe}:full_layers=0")
    assert torch.equal(model.generate(**zoo.batch(), **GREEDY, num_beams=beams), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_nobody_looks_at_is_not_missed(name):
    """Exact top k, all but a few tokens: the logits nearly are those of plain transformers."""
    model, off = zoo.build(name), {}
    ids = zoo.batch(rows=2, tokens=130, padding=(0, 11))
    mask = ids["attention_mask"]
    for recipe in ("full", "topk:tokens=120", "topk:tokens=30", "quest:tokens=48,page=4"):
        rest = "" if recipe == "full" else ",sinks=2,recent=4,full_layers=0"
        cache = kvloom.Cache(model, recipe + rest)
        with torch.no_grad():
            model(ids["input_ids"], attention_mask=mask, past_key_values=cache)
            seen = torch.cat([mask, mask[:, -1:]], dim=1)
            last = model(ids["input_ids"][:, -1:], attention_mask=seen, past_key_values=cache)
        off[recipe] = last.logits.log_softmax(-1)
        room = {"full": 131, "topk:tokens=120": 121, "topk:tokens=30": 31}.get(recipe, 52)
        assert all(probe.read(layer) <= room for layer in probe.layers(cache))
    full = off.pop("full")
    kl = {name: (full.exp() * (full - x)).sum(-1).max().item() for name, x in off.items()}
    assert kl["topk:tokens=120"] <= kl["topk:tokens=30"] + 1e-6
    assert kl["topk:tokens=120"] < 0.05


@pytest.mark.parametrize("recipe", ["clusterkv:tokens=30,size=8,sinks=4", "quest:tokens=32,page=4,"
                                    "sinks=4,recent=8", "infinigen:tokens=32,sinks=4,recent=8",
                                    "clusterkv-2bit:tokens=180",
                                    "clusterkv-2bit:tokens=180,tier=host"])  # fmt: skip
def test_beams_padding_and_drafts_run_on_a_small_budget(recipe):
    model = zoo.build("llama-gqa", head_dim=32)
    kvloom.attach(model, recipe)
    batch = zoo.batch(tokens=261, padding=(0, 17, 140))
    together = model.generate(**batch, **GREEDY)
    assert together.shape == (3, 285)
    assert_rows_follow_beams(model, recipe, batch, beams=4)
    alone = {"input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}
    assert torch.equal(model.generate(**alone, **GREEDY)[0], together[0])
    model.generation_config.eos_token_id = 2  # transformers 5.10 needs one here
    drafted = model.generate(**alone, **GREEDY, prompt_lookup_num_tokens=3)
    assert torch.equal(drafted[:, :261], alone["input_ids"])
    assert 261 < drafted.shape[1] <= 286  # 5.10: one too many, at times


@by_reference
def test_beams_padding_and_turns_over_what_a_keep_left():
    """H2O's choice of a prompt, then pages of it: rows alone are rows together."""
    model = zoo.build("llama-gqa", head_dim=32)
    keep = Keep(Budget(tokens=120, recent=20), Mass(), when="prompt")
    recipe = replace(resolve("quest:tokens=56,page=8,sinks=8,recent=8,full_layers=1"), keep=keep)
    kvloom.attach(model, recipe)
    batch = zoo.batch(tokens=261, padding=(0, 17, 200))
    together = model.generate(**batch, **GREEDY)
    assert_rows_follow_beams(model, recipe, batch, beams=4)
    alone = {"input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}
    assert torch.equal(model.generate(**alone, **GREEDY)[0], together[0])
    cache = kvloom.Cache(model, recipe)
    first = model.generate(**alone, **GREEDY, past_key_values=cache)
    model.generate(first.repeat(1, 2)[:, : first.shape[1] + 9], **GREEDY, past_key_values=cache)
    for layer in probe.layers(cache)[1:]:
        assert probe.read(layer) < 56 + 20 < probe.count(layer) < layer.seen - 100


@by_reference
def test_the_cache_of_a_model_tells_what_was_copied():
    model = zoo.build("llama-gqa")
    spec = "clusterkv:tokens=24,size=8,sinks=4,full_layers=1"
    cache, plain = (kvloom.Cache(model, spec + more) for more in (",tier=host", ""))
    batch = zoo.batch()
    answers = [
        model.generate(**batch, past_key_values=c, max_new_tokens=12, do_sample=False)
        for c in (cache, plain)
    ]
    assert torch.equal(*answers)
    assert plain.traffic == (0, 0, 0)
    read = 2 * 11 * 3 * 2 * 20  # layers, steps, rows, heads, tokens found
    assert cache.traffic.hits + cache.traffic.misses == read
    assert cache.traffic.nbytes == cache.traffic.misses * 2 * 16 * 4
