"""Layers with a sliding window whose recipe packs the window."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo
from transformers import DynamicCache

import kvloom
import probe
from kvloom.errors import CacheMisuse, IncompatibleRecipe, NotFinite
from kvloom.hf import geometry, prefill_many, read_tokens
from kvloom.hf.shared_pass import Follower
from steps import assert_same_state, state

WINDOW = 80
MODELS = ["mistral-sliding", "gemma2", "gemma3", "gpt-oss", "cohere2"]
"""Windows in all layers, a softcap, most layers, attention sinks, full layers without RoPE."""

EIGHT_BITS = "kivi:bits=8,group=16,residual=16,meta=fp32,sliding=packed"
TWO_BITS = "kivi:group=16,residual=16,sliding=packed"


def build(name: str, **changes):
    return zoo.build(name, sliding_window=WINDOW, **changes)


def windows(cache: kvloom.Cache) -> list:
    return [layer.cache for layer in cache.compressed if layer.window is not None]


def tokens(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 199, (rows, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.rare
@pytest.mark.parametrize("name", MODELS)
def test_at_eight_bits_a_model_is_nearly_the_plain_one(name):
    model, mask = build(name), torch.ones(3, 0, dtype=torch.long)
    with torch.no_grad():
        cache, plain = kvloom.Cache(model, EIGHT_BITS), DynamicCache(config=model.config)
        assert len(windows(cache)) == len(geometry(model).sliding) > 0
        for i, count in enumerate([61, 1, 1, 30, 1, 90, *[1] * 40, 7, 1]):
            ids = tokens(3, count, seed=i)
            new = torch.ones_like(ids)
            if i == 0:
                new[1, :17] = new[2, :40] = 0
            mask = torch.cat([mask, new], dim=1)
            out = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]
            exact = model(ids, attention_mask=mask, past_key_values=plain).logits[:, -1]
            error = (out - exact).norm() / exact.norm()
            assert error < (1e-5 if i == 0 else 0.03), (i, float(error))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompt", [50, 300])
def test_the_bytes_of_a_model_are_predicted_and_reported(name, prompt):
    model = build(name)
    cache = kvloom.Cache(model, TWO_BITS)
    with torch.no_grad():
        read_tokens(model, tokens(2, prompt), cache)
    g, recipe = geometry(model), cache.recipe
    assert cache.nbytes == recipe.nbytes(prompt, g, 2) + recipe.sliding_nbytes(prompt, g, 2)
    exact = kvloom.Recipe()
    assert cache.full_nbytes == exact.nbytes(prompt, g, 2) + exact.sliding_nbytes(prompt, g, 2)
    assert recipe.sliding_nbytes(300, g) < 0.6 * exact.sliding_nbytes(300, g)
    report = kvloom.attach(model, recipe)
    assert report.compressed == tuple(range(model.config.num_hidden_layers))
    assert report.skipped == {}
    assert report.nbytes == recipe.nbytes(32768, g) + recipe.sliding_nbytes(32768, g)
    full = kvloom.attach(model, "full")
    assert full.compressed == ()
    skipped = {i for i, reason in full.skipped.items() if "sliding window" in reason}
    assert skipped == {layer.layer_index for layer in g.sliding}


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3"])
def test_chunks_and_turns_give_the_windows_of_one_prompt(name):
    model, ids = build(name), tokens(2, 300)
    with torch.no_grad():
        whole, parts = (kvloom.Cache(model, EIGHT_BITS) for _ in range(2))
        read_tokens(model, ids, whole)
        for part in ids.split([70, 1, 100, 64, 65], dim=1):
            read_tokens(model, part, parts)
    first = windows(whole)[0], windows(parts)[0]  # later layers see what the first attended to
    assert_same_state(*map(state, first))


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3", "gpt-oss"])
def test_prompt_lookup_generates_the_same_tokens(name):
    model = build(name)
    model.generation_config.eos_token_id = 10_000
    half = tokens(1, 45)
    prompt = torch.cat([half, half, half[:, :5]], dim=1)
    kvloom.attach(model, TWO_BITS)
    limits = {"max_new_tokens": 60, "min_new_tokens": 60, "do_sample": False}
    plain = model.generate(prompt, **limits)
    assert torch.equal(model.generate(prompt, prompt_lookup_num_tokens=5, **limits), plain)


@pytest.mark.parametrize("name", ["mistral-sliding", "gemma3"])
def test_beams_are_those_of_the_plain_model(name):
    model, prompt = build(name), zoo.batch(rows=2, tokens=120, padding=(0, 9))
    limits = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False}
    plain = model.generate(**prompt, **limits)
    kvloom.attach(model, EIGHT_BITS)
    assert torch.equal(model.generate(**prompt, **limits), plain)


def test_a_saved_window_goes_on_alike(tmp_path):
    model = build("gemma3")
    cache, path = kvloom.Cache(model, TWO_BITS), tmp_path / "cache.safetensors"
    with torch.no_grad():
        read_tokens(model, tokens(2, 200), cache)
        cache.save(path)
        loaded = kvloom.Cache.load(model, path)
        assert loaded.nbytes == cache.nbytes
        for i in range(40):
            new = tokens(2, 1, seed=i)
            out = [read_tokens(model, new, x) for x in (cache, loaded, copy.deepcopy(loaded))]
            assert torch.equal(out[0], out[1])
            assert torch.equal(out[0], out[2])


def test_a_failed_step_leaves_windows_as_they_were():
    model = build("gemma3")
    cache = kvloom.Cache(model, TWO_BITS)
    with torch.no_grad():
        read_tokens(model, tokens(1, 223), cache)
        before = [copy.deepcopy(state(layer)) for layer in windows(cache)]
        weight = model.model.layers[-1].self_attn.v_proj.weight
        kept = weight.clone()
        weight.fill_(torch.nan)  # the last layer fails after the windows have dropped a block
        for _ in range(3):
            with pytest.raises(NotFinite):
                read_tokens(model, tokens(1, 40), cache)
        for layer, state_before in zip(windows(cache), before, strict=True):
            assert_same_state(state(layer), state_before)
        weight.copy_(kept)
        read_tokens(model, tokens(1, 1), cache)


def test_a_repetition_of_the_prompt_leaves_windows_alone():
    model, ids = build("gemma3"), tokens(1, 200)
    recipe = "small:group=16,residual=16,recent=8,chunk=50,sinks=0,sliding=packed"
    with torch.no_grad():
        repeated = kvloom.Cache(model, recipe)
        once = kvloom.Cache(model, "near-lossless:group=16,residual=16,sinks=0,sliding=packed")
        for cache in (repeated, once):
            read_tokens(model, ids, cache)
    for pair in zip(windows(repeated), windows(once), strict=True):
        assert_same_state(*map(state, pair))
    assert probe.layers(repeated)[0].dropped > 0


def test_a_crop_beyond_the_window_changes_nothing():
    model = build("gemma3")
    cache = kvloom.Cache(model, TWO_BITS)
    with torch.no_grad():
        read_tokens(model, tokens(1, 143), cache)  # 143 - 79: no token more than the window needs
    before = [state(layer.cache) for layer in cache.compressed]
    with pytest.raises(CacheMisuse, match="have left the sliding window"):
        cache.crop(-5)
    for layer, state_before in zip(cache.compressed, before, strict=True):
        assert_same_state(state(layer.cache), state_before)
    cache.crop(-143)
    assert cache.get_seq_length() == 0 == cache.nbytes


def test_caches_with_packed_windows_read_a_prompt_alone():
    model, ids = build("gemma3"), tokens(1, 150)
    leader, follower = kvloom.Cache(model, "full"), Follower(kvloom.Cache(model, TWO_BITS))
    prefill_many(model, leader, [follower], input_ids=ids)
    assert follower.error is None
    alone = kvloom.Cache(model, TWO_BITS)
    with torch.no_grad():
        read_tokens(model, ids, alone)
    for pair in zip(windows(follower.cache), windows(alone), strict=True):
        assert_same_state(*map(state, pair))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (zoo.build("gemma3"), "window of 24 tokens is too short"),
        (zoo.build("gpt-neo", window_size=WINDOW), "kvloom attends in place of gpt_neo's modules"),
        (zoo.build("llama4", attention_chunk_size=WINDOW), "begins anew after every chunk"),
        (build("gemma4-shared"), "later layers attend to its keys and values"),
    ],
    ids=["short", "adapter", "chunked", "shared"],
)
def test_windows_that_cannot_be_packed_are_refused(model, says):
    with pytest.raises(IncompatibleRecipe, match=says):
        kvloom.Cache(model, TWO_BITS)
    kvloom.Cache(model, TWO_BITS.replace("packed", "exact"))


def test_windows_of_transformers_are_not_views_of_the_prompt():
    model, ids = build("gemma3"), tokens(1, 500)
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        plain = model(ids, use_cache=True).past_key_values
        model(ids, past_key_values=cache)
        stored = [x for layer in cache.stock_layers for x in (layer.keys, layer.values)]
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in stored)
        recipe, g = cache.recipe, cache.geometry
        assert cache.nbytes == recipe.nbytes(500, g) + recipe.sliding_nbytes(500, g)
        assert cache.nbytes == cache.full_nbytes
        cache.crop(0)
        new = tokens(1, 3, seed=1)
        want = model(new, past_key_values=plain).logits
        torch.testing.assert_close(model(new, past_key_values=cache).logits, want)
