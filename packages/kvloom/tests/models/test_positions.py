"""Renumbered positions: the tokens that stay are attended to as if no others had ever been.

In a model of one layer a key knows its token and its position alone, so that the answer must be
that of plain transformers reading the kept tokens and nothing else.
"""

from __future__ import annotations

import pytest
import torch
import transformers as tf
import zoo
from transformers import DynamicCache

import kvloom
import probe
from backends import by_reference
from kvloom.errors import IncompatibleRecipe, UnsupportedModel
from kvloom.hf import layer_ropes
from kvloom.recipe.resolve import resolve
from sampling import slow_except

MOVABLE = [n for n in zoo.CONFIGS if n not in (*zoo.LEARNED, "mistral-sliding")]
# Of each way to know how a model rotates.
QUICK = ("llama-gqa", "gemma2", "glm4", *(name for name in zoo.ADAPTED if name not in zoo.LEARNED))
TOKENS = 41
BY_AGE = ("streaming:tokens=20,sinks=4,positions=renumbered",)
BY_SCORE = (
    "h2o:tokens=20,positions=renumbered",
    "h2o:tokens=20,positions=renumbered,limit=30",
    "snapkv:tokens=20,window=4,positions=renumbered",
    "keyformer:fraction=0.5,positions=renumbered",
)


def one_layer(name):
    full = {"layer_types": ["full_attention"]} if name.startswith("gemma") else {}
    full |= {"num_kv_shared_layers": 0} if name == "gemma4-shared" else {}
    return zoo.build(name, num_hidden_layers=1, **full)


def one_layer_without_rope(name):
    changes = {} if name == "smollm3" else {"layer_types": ["full_attention"]}
    return zoo.build(name, num_hidden_layers=1, no_rope_layers=[0], **changes)


def kept(cache) -> list[int]:
    """The logical indices held, one kv head or all alike, in order."""
    return probe.kept(probe.layers(cache)[0])[0, 0].tolist()


@torch.no_grad()  # a step that asks for a gradient is left to the reference
def logits(model, ids, **kwargs):
    return model(input_ids=ids, use_cache=True, **kwargs).logits[:, -1]


def steps(model, recipe, remember=False):
    """(tokens read so far, kept before the step, logits of the step) of a few steps."""
    ids = zoo.batch(1, TOKENS + 16, (0,))["input_ids"]
    cache = kvloom.Cache(model, recipe)
    if remember:
        probe.observe(cache)  # snapkv: no other part needs to know which tokens stay
    logits(model, ids[:, :TOKENS], past_key_values=cache)
    at = TOKENS
    for t in (1, 1, 1, 5, 1, 3, 1, 1):
        before = kept(cache)
        yield ids, at, t, before, logits(model, ids[:, at : at + t], past_key_values=cache)
        at += t


@pytest.mark.parametrize("recipe", BY_AGE)
@pytest.mark.parametrize("name", slow_except(MOVABLE, *QUICK))
def test_tokens_kept_by_age(name, recipe):
    model = one_layer(name)
    for ids, at, t, before, got in steps(model, recipe):
        assert len(before) == 20
        want = logits(model, torch.cat([ids[:, before], ids[:, at : at + t]], dim=1))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@by_reference
@pytest.mark.parametrize("name", zoo.WITHOUT_ROPE)
def test_tokens_of_a_layer_without_rope_are_not_moved(name):
    model = one_layer_without_rope(name)
    for ids, at, t, before, got in steps(model, BY_AGE[0]):
        want = logits(model, torch.cat([ids[:, before], ids[:, at : at + t]], dim=1))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@by_reference
@torch.no_grad()
def test_each_layer_moves_its_own_keys():
    """A step of plain transformers whose past is cut, and moved in the layers with RoPE alone."""
    model, ids = zoo.build("smollm3"), zoo.batch(1, TOKENS + 1, (0,))["input_ids"]
    cache, past = kvloom.Cache(model, BY_AGE[0]), DynamicCache(config=model.config)
    logits(model, ids[:, :TOKENS], past_key_values=cache)
    got = logits(model, ids[:, TOKENS:], past_key_values=cache)
    plain = zoo.build("smollm3")
    logits(plain, ids[:, :TOKENS], past_key_values=past)
    before = [*range(4), *range(TOKENS - 16, TOKENS)]
    for layer, rope in zip(past.layers, layer_ropes(plain), strict=True):
        layer.keys, layer.values = layer.keys[:, :, before], layer.values[:, :, before]
        if rope is not None:
            index = torch.tensor(before).view(1, 1, -1)
            layer.keys = rope.rotate(layer.keys, torch.arange(TOKENS - 20, TOKENS) - index)
    places = torch.full((1, 1), TOKENS)
    mask = torch.ones(1, 21, dtype=torch.long)
    more = {"position_ids": places, "attention_mask": mask}
    want = logits(plain, ids[:, TOKENS:], past_key_values=past, **more)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("recipe", BY_SCORE)
def test_tokens_kept_by_score(recipe):
    model = one_layer("llama-mqa")
    for ids, at, t, before, got in steps(model, recipe, remember=recipe.startswith("snapkv")):
        assert len(before) < at
        want = logits(model, torch.cat([ids[:, before], ids[:, at : at + t]], dim=1))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_original_positions_are_another_answer():
    model = one_layer("llama-mqa")
    pairs = zip(
        steps(model, "h2o:tokens=20"),
        steps(model, "h2o:tokens=20,positions=renumbered"),
        strict=True,
    )
    assert any(not torch.allclose(a[-1], b[-1], atol=1e-2) for a, b in pairs)


@pytest.mark.parametrize("name", zoo.LEARNED)
def test_learned_positions_of_new_tokens(name):
    model = one_layer(name)
    recipe = "streaming:tokens=20,sinks=4,positions=renumbered"
    plain = one_layer(name)
    for ids, at, t, before, got in steps(model, recipe):
        if at > TOKENS:  # later keys carry the positions they were given
            break
        past = DynamicCache(config=plain.config)
        plain(ids[:, :at], past_key_values=past, use_cache=True)
        layer = past.layers[0]
        layer.keys, layer.values = layer.keys[:, :, before], layer.values[:, :, before]
        places = torch.arange(20, 20 + t)[None]
        mask = torch.ones(1, 20 + t, dtype=torch.long)
        want = logits(
            plain,
            ids[:, at : at + t],
            past_key_values=past,
            position_ids=places,
            attention_mask=mask,
        )
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "opt", "gpt-neox"])
@pytest.mark.parametrize(
    "recipe",
    [
        *BY_AGE,
        "h2o:tokens=20,positions=renumbered",
        "snapkv:tokens=20,window=8,positions=renumbered",
    ],
)
def test_padding_and_beams(name, recipe):
    model, inputs = zoo.build(name), zoo.batch()
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    for more in ({}, {"num_beams": 3}):
        together = model.generate(
            **inputs, **kwargs, **more, past_key_values=kvloom.Cache(model, recipe)
        )
        assert together.shape == (3, 61 + 12)
    # a row alone, unpadded, is the row in the batch: nothing of it is dropped differently
    row = {k: v[:1] for k, v in inputs.items()}
    alone = model.generate(**row, **kwargs, past_key_values=kvloom.Cache(model, recipe))
    batch = model.generate(**inputs, **kwargs, past_key_values=kvloom.Cache(model, recipe))
    assert torch.equal(alone[0], batch[0])


@pytest.mark.parametrize("recipe", [*BY_AGE, "h2o:tokens=100,positions=renumbered"])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "opt"])
def test_a_padded_row_is_the_row_alone(name, recipe):
    """Streaming drops by age within a row; a budget above the prompt drops nothing."""
    model, inputs = one_layer(name), zoo.batch()
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    batch = model.generate(**inputs, **kwargs, past_key_values=kvloom.Cache(model, recipe))
    row, pad = 1, 17
    ids = inputs["input_ids"][row : row + 1, pad:]
    alone = model.generate(ids, **kwargs, past_key_values=kvloom.Cache(model, recipe))
    assert torch.equal(alone[0, 61 - pad :], batch[row, 61:])


@by_reference
def test_learned_positions_need_one_budget():
    model = zoo.build("gpt2")
    recipe = "h2o:tokens=20,layers=pyramid,positions=renumbered"
    with pytest.raises(IncompatibleRecipe, match='equally many tokens; use layers="uniform"'):
        kvloom.attach(model, recipe)
    assert not hasattr(model, "_kvloom")


@by_reference
def test_an_unknown_rotary_embedding_is_refused_before_anything_changes(monkeypatch):
    model = zoo.build("llama-gqa")
    module = __import__(type(model).__module__, fromlist=["x"])
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k * cos))
    recipe = resolve("h2o:tokens=20,positions=renumbered")
    for use in (kvloom.attach, kvloom.Cache):
        with pytest.raises(UnsupportedModel, match="does not understand its rotary embedding"):
            use(model, recipe)
    assert not hasattr(model, "_kvloom")
    kvloom.attach(model, "h2o:tokens=20")  # positions as they are need no understanding


@by_reference
def test_positions_that_the_model_counts_itself_cannot_be_renumbered():
    model = tf.BartForCausalLM(tf.BartConfig(d_model=32, vocab_size=99, decoder_layers=1))
    recipe = "h2o:tokens=20,positions=renumbered"
    with pytest.raises(UnsupportedModel, match="its forward takes no position_ids"):
        kvloom.attach(model, recipe)
    assert not hasattr(model, "_kvloom")
