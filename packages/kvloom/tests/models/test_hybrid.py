"""Models whose other layers carry states: these follow the cache, or are refused by name."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import transformers as tf
import zoo

import kvloom
import probe
from backends import by_reference
from kvloom.calibrate.read_prompt import ReadPrompt
from kvloom.errors import CacheMisuse, SavedCacheError, UnsupportedModel
from kvloom.hf import Follower, observe_steps, prefill_many, save, state_nbytes
from kvloom.recipe.resolve import resolve

pytestmark = [by_reference, pytest.mark.filterwarnings("ignore")]

KINDS = {  # of recipes
    "kivi": "kivi:group=16,residual=16",
    "snapkv": "snapkv:tokens=20,window=8",
    "h2o": "h2o:tokens=20",
    "quest": "quest:tokens=24,page=4,sinks=2,recent=4,full_layers=0",
    "small": "small:fraction=0.5,group=16,residual=16,recent=8",
}
RECORDS = hasattr(tf.cache_utils.LinearAttentionCacheLayerMixin, "activate_past_recording")
"""Else transformers is old: it records no states, and reads no padded row of LFM2 in parts."""

GREEDY = {"max_new_tokens": 8, "do_sample": False}
BATCH = zoo.batch(3, 80, (0, 17, 40))
PROMPT, END = 61, 70

hybrids = pytest.mark.parametrize("name", zoo.HYBRIDS)
recipes = pytest.mark.parametrize("recipe", ["full", *KINDS.values()])
records = pytest.mark.skipif(not RECORDS, reason="this transformers records no states")
followed = pytest.mark.parametrize(
    ("name", "recipe"),
    [(name, "full") for name in zoo.HYBRIDS] + [*zip(zoo.HYBRIDS, KINDS.values(), strict=True)],
)
"""Each family with the exact recipe, and with one of another kind."""


@torch.no_grad()
def step(model, cache, begin, end, rows=slice(None)):
    """Logits of tokens begin to end after those that the cache holds."""
    ids, mask = BATCH["input_ids"][rows, begin:end], BATCH["attention_mask"][rows, :end]
    return model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits


def prefilled(model, recipe):
    cache = kvloom.Cache(model, recipe)
    step(model, cache, 0, PROMPT)
    return cache


def continued(model, cache, rows=slice(None)):
    """Logits of several tokens, and of single ones."""
    ends = (PROMPT, 65, 66, 67, END) if RECORDS else range(PROMPT, END + 1)
    return torch.cat([step(model, cache, *pair, rows) for pair in pairwise(ends)], dim=1)


@hybrids
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}])
def test_full_gives_the_tokens_of_plain_transformers(name, options):
    model = zoo.build(name)
    prompt = zoo.batch(1, 61, (0,)) if "prefill_chunk_size" in options else zoo.batch()
    plain = dict(options)
    if name == "minimax" and options:  # its own cache takes no chunks, and mixes up beams
        plain.pop("prefill_chunk_size", None)
        plain["use_cache"] = False
    expected = model.generate(**prompt, **GREEDY, **plain)
    report = kvloom.attach(model, "full")
    assert torch.equal(model.generate(**prompt, **GREEDY, **options), expected)
    assert "the recipe leaves it exact" in report.skipped.values()


@hybrids
def test_full_gives_the_logits_of_plain_transformers_in_every_step(name):
    model = zoo.build(name)
    prompt = {key: x[:, :PROMPT] for key, x in BATCH.items()}
    with torch.no_grad():
        plain = continued(model, model(**prompt, use_cache=True).past_key_values)
    full = continued(model, prefilled(model, "full"))
    torch.testing.assert_close(full, plain, rtol=1e-4, atol=1e-3)


@hybrids
@recipes
def test_a_prompt_attends_exactly_and_rows_do_not_see_each_other(name, recipe):
    if name == "lfm2" and recipe == KINDS["small"] and not RECORDS:
        pytest.skip("the prompt is repeated in parts")
    model = zoo.build(name)
    prompt = {key: x[:, :PROMPT] for key, x in BATCH.items()}
    with torch.no_grad():
        want = model(**prompt, use_cache=False).logits
        got = model(**prompt, past_key_values=kvloom.Cache(model, recipe)).logits
    real = prompt["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
    kvloom.attach(model, recipe)
    together = model.generate(**prompt, **GREEDY)
    alone = model.generate(**{key: x[:1] for key, x in prompt.items()}, **GREEDY)
    assert torch.equal(alone[0], together[0])


@hybrids
def test_steps_behind_a_recall_of_all_tokens_are_exact(name):
    model = zoo.build(name)
    exact = continued(model, prefilled(model, "full"))
    recall = "quest:tokens=96,page=4,sinks=2,recent=4,full_layers=0"
    recalled = continued(model, prefilled(model, recall))
    torch.testing.assert_close(recalled, exact, rtol=1e-4, atol=1e-3)


@followed
def test_a_step_that_fails_changes_no_state(name, recipe):
    model = zoo.build(name)
    expected = continued(model, prefilled(model, recipe))
    cache, last = prefilled(model, recipe), model.get_decoder().layers[-1]

    def fail(*_):
        raise KeyboardInterrupt

    for end in (PROMPT + 1, PROMPT + (5 if RECORDS else 1)):
        handle = last.register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            step(model, cache, PROMPT, end)
        handle.remove()
    assert torch.equal(continued(model, cache), expected)


@followed
def test_copies_and_saved_caches_have_states_of_their_own(name, recipe, tmp_path):
    model = zoo.build(name)
    cache = prefilled(model, recipe)
    copied = copy.deepcopy(cache)
    cache.save(tmp_path / "cache.kv")
    expected = continued(model, cache)
    second = zoo.build(name)
    loaded = kvloom.Cache.load(second, tmp_path / "cache.kv")
    assert loaded.nbytes == copied.nbytes
    assert loaded.state_nbytes == copied.state_nbytes > 0
    loaded.save(tmp_path / "again.kv")
    assert (tmp_path / "again.kv").read_bytes() == (tmp_path / "cache.kv").read_bytes()
    assert torch.equal(continued(model, copied), expected)
    assert torch.equal(continued(second, loaded), expected)


@followed
def test_states_follow_their_rows(name, recipe):
    model = zoo.build(name)
    expected = continued(model, prefilled(model, recipe))
    changes = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
        "batch_select_indices": (torch.tensor([0, 2]), [0, 2]),
    }
    for method, (argument, rows) in changes.items():
        cache = prefilled(model, recipe)
        getattr(cache, method)(argument)
        torch.testing.assert_close(
            continued(model, cache, rows), expected[rows], rtol=1e-4, atol=1e-4
        )
    cache.reset()
    step(model, cache, 0, PROMPT)
    assert torch.equal(continued(model, cache), expected)


@followed
def test_predicted_bytes_are_exact(name, recipe):
    model, cache = zoo.build(name), None
    cache = kvloom.Cache(model, recipe)
    with torch.no_grad():
        model(BATCH["input_ids"], past_key_values=cache)
    states = state_nbytes(model)
    assert cache.state_nbytes == 3 * sum(states)
    predicted = resolve(recipe).nbytes(80, cache.geometry, batch=3)
    assert cache.nbytes == predicted + 3 * sum(states)
    report = kvloom.attach(model, recipe)
    assert report.state_nbytes == sum(states)
    assert report.nbytes == resolve(recipe).nbytes(32768, cache.geometry) + sum(states)
    assert f"{sum(states) / 2**20:,.1f} MiB of both are states" in str(report)


@pytest.mark.parametrize("name", sorted(set(zoo.HYBRIDS) - {"lfm2"}))
def test_what_a_recurrent_state_cannot_undo_is_refused_and_changes_nothing(name):
    model = zoo.build(name)
    expected = continued(model, prefilled(model, "full"))
    cache = prefilled(model, "full")
    with pytest.raises(CacheMisuse, match="crop cannot take tokens back out of the recurrent"):
        cache.crop(-2)
    kvloom.attach(model, "full")
    with pytest.raises((ValueError, CacheMisuse), match=r"stateful|recurrent state"):
        model.generate(**zoo.batch(1, 30, (0,)), **GREEDY, prompt_lookup_num_tokens=3)
    assert torch.equal(continued(model, cache), expected)


@records
@pytest.mark.parametrize("recipe", ["full", KINDS["kivi"], KINDS["snapkv"]])
def test_convolutions_give_back_the_tokens_that_they_recorded(recipe):
    model = zoo.build("lfm2")
    caches = [prefilled(model, recipe) for _ in range(2)]
    for cache in caches:
        cache.activate_past_recording()
    expected = continued(model, caches[0])
    step(model, cache, 3, 8)
    step(model, cache, 0, 1)
    with pytest.raises(CacheMisuse, match=r"recorded 6 of them|crop its 6 tokens first"):
        cache.crop(-7)
    cache.crop(-6)
    assert cache.get_seq_length() == PROMPT
    torch.testing.assert_close(continued(model, cache), expected, rtol=1e-4, atol=1e-4)


@records
@pytest.mark.parametrize("recipe", ["full", *(KINDS[kind] for kind in KINDS if kind != "small")])
def test_drafts_of_convolutions_change_no_token(recipe):
    model = zoo.build("lfm2")
    kvloom.attach(model, recipe)
    prompt = zoo.batch(1, 8, (0,))["input_ids"].repeat(1, 6)  # which a lookup continues
    settings = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(prompt, **settings)
    assert torch.equal(model.generate(prompt, **settings, prompt_lookup_num_tokens=4), expected)


def test_sliding_layers_give_back_the_tokens_that_they_recorded():
    model = zoo.build("gemma3")
    cache = prefilled(model, "full")
    with pytest.raises(CacheMisuse, match=r"crop cannot take 7 tokens .* recorded 0 of them"):
        cache.crop(-7)
    expected = continued(model, prefilled(model, "full"))
    assert torch.equal(continued(model, cache), expected)


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1"])
def test_caches_that_share_a_prompt_have_states_of_their_own(name):
    model = zoo.build(name)
    prompt = {key: x[:, :PROMPT] for key, x in BATCH.items()}
    leader = kvloom.Cache(model, "full")
    followers = [Follower(kvloom.Cache(model, recipe)) for recipe in KINDS.values()]
    prefill_many(model, leader, followers, **prompt)
    for recipe, cache in zip(
        ("full", *KINDS.values()), (leader, *(x.cache for x in followers)), strict=True
    ):
        assert torch.equal(continued(model, cache), continued(model, prefilled(model, recipe)))


@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1"])
def test_observed_steps_are_those_of_the_cache(name):
    model, seen = zoo.build(name), []
    expected = continued(model, prefilled(model, KINDS["h2o"]))
    cache = kvloom.Cache(model, KINDS["h2o"])
    observe_steps(cache, lambda observed: seen.append((observed.layer, observed.keys.shape[2])))
    step(model, cache, 0, PROMPT)
    assert torch.equal(continued(model, cache), expected)
    assert seen[: len(cache.full_layers)] == [(i, PROMPT) for i in range(len(cache.full_layers))]


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-next", "falcon-h1"])
def test_candidates_of_one_pass_diverge_as_each_alone(name):
    model = zoo.build(name)
    ids = BATCH["input_ids"][:1]
    prompt = ReadPrompt(model, ids[:, :PROMPT], ids[:, PROMPT:END], step=1)
    found = prompt.whole([resolve("full"), resolve(KINDS["snapkv"])])
    alone = kvloom.Cache(model, KINDS["snapkv"])
    model(ids[:, :PROMPT], past_key_values=alone)
    logits = [model(x, past_key_values=alone).logits for x in ids[:, PROMPT:END].split(1, 1)]
    logp = torch.cat(logits, dim=1)[0].log_softmax(-1)
    want = (prompt.logp.exp() * (prompt.logp - logp)).sum(-1)
    torch.testing.assert_close(found[0], torch.zeros_like(want), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[1], want, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_candidates_are_scored_by_repetitions_of_their_own():
    model, ids = zoo.build("llama-gqa"), BATCH["input_ids"][:1]
    recipes = [resolve(f"kvzip:tokens=20,recent=4,chunk={x},instruction=5 6") for x in (9, 61)]
    prompts = (ReadPrompt(model, ids[:, :PROMPT], ids[:, PROMPT:END], step=1) for _ in range(3))
    asked = recipes, recipes[:1], recipes[1:]
    both, *alone = (x.whole(y) for x, y in zip(prompts, asked, strict=True))
    torch.testing.assert_close(both, torch.cat(alone))
    assert not torch.allclose(both[0], both[1])
    prompt = ReadPrompt(model, ids[:, :PROMPT], ids[:, PROMPT:END], step=1)
    needs_none = resolve("kvzip:tokens=500,recent=4,chunk=9,instruction=5 6")
    assert torch.equal(prompt.whole([needs_none, recipes[0]])[1], both[0])


@torch.no_grad()
def test_candidates_that_need_all_queries_of_a_prompt_are_refused():
    model, ids = zoo.build("llama-gqa"), BATCH["input_ids"][:1]
    prompt = ReadPrompt(model, ids[:, :PROMPT], ids[:, PROMPT:END], step=1)
    with pytest.raises(CacheMisuse, match=r"'small' needs the queries of a whole prompt"):
        prompt.whole([resolve("small")])


def test_a_state_in_a_module_is_refused():
    config = tf.RecurrentGemmaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        vocab_size=199, lru_width=64,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    reason = "keeps its recurrent states in its modules, where a cache cannot restore"
    with pytest.raises(UnsupportedModel, match=reason):
        kvloom.attach(model, "full")


def test_states_of_another_transformers_are_refused(tmp_path, monkeypatch):
    model = zoo.build("lfm2")
    prefilled(model, "full").save(tmp_path / "cache.kv")
    monkeypatch.setattr(save.transformers, "__version__", "5.0.0")
    with pytest.raises(SavedCacheError, match=r"this model is .* with transformers=5\.0\.0"):
        kvloom.Cache.load(model, tmp_path / "cache.kv")
    assert probe.layers(kvloom.Cache(model, "full"))
