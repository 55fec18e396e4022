"""Every model's rotary embedding is found out, or refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers as tf
import zoo

import kvloom
import probe
from backends import by_reference
from kvloom.errors import IncompatibleRecipe, UnsupportedModel
from kvloom.hf import layer_ropes
from kvloom.recipe import Recipe
from kvloom.store import Packed, Store

pytestmark = by_reference  # none of this depends on kernels

SCALED = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}
BEFORE_ROPE = Packed(8, "token", 16, pre_rope=True)
OTHER_KEYS = ("diffllama", "roformer")  # kvloom stores pairs of heads; the model takes no positions
NONE = (*zoo.LEARNED, "mpt", "falcon-alibi", "bloom")


def moved_keys(model, by: int):
    """Keys of the first layer of plain transformers: of a prompt, and of one that begins later."""
    ids, held = zoo.batch(1, 9, (0,))["input_ids"], []
    for start in (0, by):
        places = torch.arange(start, start + 9)[None]
        with torch.no_grad():
            past = model(ids, position_ids=places, use_cache=True).past_key_values
        latent = hasattr(model.config, "kv_lora_rank")  # before its positional part
        held.append(past.layers[0].values if latent else past.layers[0].keys)
    return held


@pytest.mark.parametrize(
    "name", [n for n in zoo.CONFIGS if n not in (*NONE, *OTHER_KEYS, "mistral-sliding")]
)
def test_keys_of_a_shifted_prompt_are_the_turned_keys(name):
    full = {"layer_types": ["full_attention"]} if name.startswith("gemma") else {}
    full |= {"num_kv_shared_layers": 0} if name == "gemma4-shared" else {}
    model = zoo.build(name, num_hidden_layers=1, **full)
    found = layer_ropes(model)[0]
    first, moved = moved_keys(model, 31)
    turned = found.rotate(first, torch.full((1, 1, 9), 31))
    torch.testing.assert_close(turned, moved, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first, moved, atol=1e-2)


@pytest.mark.parametrize("name", [n for n in OTHER_KEYS if n in zoo.CONFIGS])
def test_keys_of_a_repeated_prompt_are_the_turned_keys(name):
    model = zoo.build(name, num_hidden_layers=1)
    ids = zoo.batch(1, 9, (0,))["input_ids"]
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        model(torch.cat([ids, ids[:, :4], ids], dim=1), past_key_values=cache)
    held = probe.oldest_keys(probe.layers(cache)[0], 22)
    turned = layer_ropes(model)[0].rotate(held[:, :, :9], torch.full((1, 1, 9), 13))
    torch.testing.assert_close(turned, held[:, :, 13:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(held[:, :, :9], held[:, :, 13:], atol=1e-2)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_frequencies(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4} | SCALED[kind]
    model = zoo.build("llama-gqa", rope_parameters=rope)
    found, plain = layer_ropes(model)[0], layer_ropes(zoo.build("llama-gqa"))[0]
    assert not torch.equal(found.inv_freq, plain.inv_freq)
    first, moved = moved_keys(model, 310)
    turned = found.rotate(first, torch.full((1, 1, 9), 310))
    torch.testing.assert_close(turned, moved, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NONE)
def test_learned_positions_and_alibi_do_not_rotate(name):
    assert set(layer_ropes(zoo.build(name))) == {None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "rotates"),
    [
        ("smollm3", [True, False, True]), ("cohere2", [False]), ("llama4", [False]),
        ("jamba", [False, False]), ("falcon-h1", [True, True, True]), ("glm4", [True] * 3),
    ],
)  # fmt: skip
def test_layers_without_rope_are_found_in_the_same_model(name, rotates, dtype):
    found = layer_ropes(zoo.build(name).to(dtype))
    assert [rope is not None for rope in found] == rotates


def changing(kind: str):
    """A model whose frequencies depend on the length, beyond 64 tokens."""
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4}
    if kind == "dynamic":
        return zoo.build("llama-gqa", rope_parameters=rope, max_position_embeddings=64)
    factors = torch.arange(8)
    rope |= {"short_factor": (1 + factors / 10).tolist(), "long_factor": (2.0 + factors).tolist()}
    rope |= {"original_max_position_embeddings": 64}
    return zoo.build("llama-gqa", rope_parameters=rope, original_max_position_embeddings=64)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_change_are_kept_as_they_are_or_refused(kind):
    """Plain transformers gives other answers without a cache, and dynamic NTK in a second call."""
    prompt = zoo.batch(1, 56, (0,))
    settings = {"max_new_tokens": 24, "do_sample": False}
    plain = changing(kind).generate(**prompt, **settings)
    assert not torch.equal(changing(kind).generate(**prompt, **settings, use_cache=False), plain)
    model = changing(kind)
    with pytest.raises(UnsupportedModel, match=r"changes with the length.*positions=\"original\""):
        kvloom.attach(model, "h2o:tokens=20,positions=renumbered")
    with pytest.raises(IncompatibleRecipe, match="rotary embedding; use another score"):
        kvloom.attach(model, "expected:tokens=20,recent=4")
    with pytest.raises(IncompatibleRecipe, match=r"packed before RoPE: .* use pre_rope=false"):
        kvloom.attach(model, Recipe(store=Store(keys=BEFORE_ROPE)))
    kvloom.attach(model, "full")
    assert torch.equal(model.generate(**prompt, **settings), plain)


@pytest.mark.parametrize("recipe", ["rotated:tokens=60", Recipe(store=Store(BEFORE_ROPE, None))])
def test_another_dtype_rounds_the_frequencies(recipe):
    model = zoo.build("llama-gqa")
    before = [layer_ropes(model)[0], *ropes_of_formats(model, recipe)]
    model.to(torch.bfloat16)
    after = [layer_ropes(model)[0], *ropes_of_formats(model, recipe)]
    assert len(before) == len(after) == 4
    for one, other in zip(before, after, strict=True):
        assert torch.equal(other.inv_freq, one.inv_freq.bfloat16().float())
        assert not torch.equal(other.inv_freq, one.inv_freq)


@pytest.mark.parametrize("spec", ["{}", "h2o:tokens=40@last 1={}"])
def test_queries_move_no_further_than_the_model_has_positions(spec):
    """A chunk has at most half of them."""
    spec = spec.format("rotated:tokens=40,fit=true{}")
    model = zoo.build("llama-gqa", max_position_embeddings=100)
    ids = zoo.batch(1, 96, (0,))["input_ids"]
    caches = [kvloom.Cache(model, spec.format(chunk)) for chunk in ("", ",chunk=50", ",chunk=20")]
    for cache in caches:
        with torch.no_grad():
            model(ids, past_key_values=cache)
    keep = caches[0].compressed[-1].cache.recipe.keep
    assert keep.scorer.chunk == keep.fit.chunk == 50
    states = (cache.compressed[-1].cache.state()["storage"] for cache in caches)
    first, same, other = (state["values"]["tail"]["live"] for state in states)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def ropes_of_formats(model, recipe):
    return [layer.cache.facts.rope for layer in kvloom.Cache(model, recipe).compressed]


def test_keys_that_are_normalized_after_rotation_are_refused():
    config = tf.HunYuanDenseV1Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=199, use_qk_norm=True,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "key_layernorm" in name:
                parameter.normal_()
    with pytest.raises(UnsupportedModel, match="does not understand its rotary embedding"):
        layer_ropes(model)


def test_positions_that_cannot_be_given_are_not_renumbered():
    config = tf.BartConfig(
        d_model=64, decoder_layers=2, decoder_ffn_dim=96, decoder_attention_heads=4,
        vocab_size=199, is_decoder=True, is_encoder_decoder=False, add_cross_attention=False,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="its forward takes no position_ids"):
        kvloom.attach(model, "streaming:tokens=20,positions=renumbered")


@torch.no_grad()
def test_keys_before_rope_are_the_keys_where_there_is_none():
    model, held = zoo.build("smollm3"), []
    for fmt in (BEFORE_ROPE, replace(BEFORE_ROPE, pre_rope=False)):
        recipe = Recipe(store=Store(keys=fmt))
        cache = kvloom.Cache(model, recipe)
        model(zoo.batch(1, 40, (0,))["input_ids"], past_key_values=cache)
        assert cache.nbytes == recipe.nbytes(40, cache.geometry)
        bodies = [probe.tokens(layer) for layer in probe.layers(cache)]
        held.append([x.unpacked_keys(0, x.keys.packed_count) for x in bodies])
    equal = [torch.allclose(*keys, atol=1e-5) for keys in zip(*held, strict=True)]
    assert equal == [False, True, False]
