"""Latent attention (MLA): stored as latents, attended without expanding the past."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
import transformers as tf
import zoo
from torch import nn

import kvloom
import probe
from kvloom.errors import IncompatibleRecipe, UnsupportedModel
from kvloom.hf.compat import geometry
from kvloom.kernels import dispatch
from kvloom.recipe.resolve import resolve

if "deepseek-v3" not in zoo.CONFIGS:
    pytest.skip("this transformers caches expanded keys and values", allow_module_level=True)

STORED = [
    "full", "near-lossless:group=16,residual=16", "balanced:residual=16,group=16",
    "kivi:group=16,residual=16",
    "turbo:bits=2", "rtn:group=16", "streaming:tokens=24,sinks=4",
    "snapkv:tokens=20,window=8", "h2o:tokens=24", "keyformer:tokens=24",
    "small:fraction=0.5,group=16,residual=16,recent=8", "knorm:tokens=24,recent=8",
]  # fmt: skip
READ = ["quest:tokens=24,page=4,sinks=2,recent=4,full_layers=0"]


@pytest.fixture(scope="module")
def model():
    return zoo.build("deepseek-v3")


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def filled(model, recipe, tokens=61, **changes):
    cache = kvloom.Cache(model, recipe)
    model(**zoo.batch(1, tokens, (0,)), past_key_values=cache, **changes)
    return cache


def stored(cache):
    """transformers' cache with the tokens that a kvloom cache stores, unpacked."""
    plain = tf.DynamicCache()
    for number, layer in enumerate(cache.full_layers):
        state = layer.cache._state
        parts = [view.tensor() for view in state.storage.region(None, 0)[:2]]
        if state.sinks is not None:
            parts = [
                torch.cat(x, dim=2)
                for x in zip((state.sinks.keys, state.sinks.values), parts, strict=True)
            ]
        if state.evictor is not None and hasattr(state.storage, "free"):  # but the free slot
            parts = list(state.storage.in_order()[:2])
        plain.update(parts[1], parts[0], number)
    return plain


@pytest.mark.parametrize("recipe", [*STORED, *READ])
def test_a_prompt_is_that_of_transformers(model, recipe):
    batch = zoo.batch()
    real = batch["attention_mask"].bool()
    cache = kvloom.Cache(model, recipe)
    got, want = model(**batch, past_key_values=cache).logits, model(**batch).logits
    assert torch.equal(got[real], want[real])


@pytest.mark.parametrize("tokens", [1, 3, 12])
@pytest.mark.parametrize("recipe", STORED)
def test_later_tokens_attend_to_what_is_stored(model, recipe, tokens):
    """As transformers attends to the same latents, expanded."""
    cache = filled(model, recipe)
    plain = stored(cache)
    ids = torch.arange(5, 5 + tokens)[None]
    options = {"position_ids": torch.arange(61, 61 + tokens)[None]}
    if tokens > 1:  # a mask of the tokens that are stored and of the new ones
        n = plain.get_seq_length()
        options["attention_mask"] = torch.ones(1, n + tokens)
    want = model(ids, past_key_values=plain, **options).logits
    got = model(ids, past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=2e-4 if tokens == 1 else 5e-4)


def test_a_step_reads_packed_latents_by_a_kernel(model):
    cache = filled(model, "near-lossless:group=16,residual=16")
    dispatch.ran.clear()
    model(torch.tensor([[5]]), past_key_values=cache)
    plan = cache.full_layers[0].cache._state.plan
    assert (plan.bound.kernel is None) == (dispatch.setting() == "ref"), plan.bound.why


def test_the_score_is_the_attention_of_all_heads(model):
    """The choice of h2o, from transformers' attention weights."""
    batch = zoo.batch(1, 61, (0,))
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    weights = eager(**batch, output_attentions=True).attentions
    cache = filled(model, "h2o:tokens=24,recent=8")
    for layer, weight in zip(cache.full_layers, weights, strict=True):
        mass = weight[0].sum(dim=(0, 1))
        best = mass[:-8].topk(16).indices
        want = sorted([*best.tolist(), *range(53, 61)])
        assert sorted(layer.cache.logical()[0, 0].tolist()) == want


@pytest.mark.parametrize("recipe", ["topk:tokens=24", "quest:tokens=24,page=1"])
def test_a_step_recalls_the_tokens_with_the_largest_logits(model, recipe):
    """In the first layer, whose input is that of transformers; a page of one token is its key."""
    batch = zoo.batch(1, 61, (0,))
    cache = filled(model, f"{recipe},sinks=2,recent=4,full_layers=0")
    probe.observe(cache)
    model(torch.tensor([[5]]), past_key_values=cache)
    found = probe.recalled(probe.layers(cache)[0])[0, 0] + 2  # the sinks are stored apart
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    ids = torch.cat([batch["input_ids"], torch.tensor([[5]])], dim=1)
    weights = eager(ids, output_attentions=True).attentions[0]
    logits = weights[0, :, -1, 2:57].log().mean(dim=0)  # but those of sinks and recent tokens
    assert sorted(found.tolist()) == sorted((logits.topk(len(found)).indices + 2).tolist())


@pytest.mark.parametrize("tokens", [9, 61, 200])
@pytest.mark.parametrize("recipe", [*STORED, *READ])
def test_bytes_are_predicted(model, recipe, tokens):
    recipe = resolve(recipe)
    cache = filled(model, recipe, tokens)
    assert cache.nbytes == recipe.nbytes(tokens, geometry(model))


def test_bytes_of_an_exact_cache_are_those_of_transformers(model):
    batch = zoo.batch(1, 61, (0,))
    plain = model(**batch, use_cache=True).past_key_values
    want = sum(x.nbytes for layer in plain.layers for x in (layer.keys, layer.values))
    for recipe in ("full", "kivi:group=16,residual=16"):
        assert filled(model, recipe).full_nbytes == want


@pytest.mark.parametrize("recipe", ["full", *READ])
def test_chunks_and_turns(model, recipe):
    ids = zoo.batch(1, 61, (0,))["input_ids"]
    want = model(ids).logits
    cache = kvloom.Cache(model, recipe.replace("tokens=24", "tokens=96"))
    got = [model(x, past_key_values=cache).logits for x in ids.split([20, 30, 1, 10], dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"assistant": True}, {"prompt_lookup": 3}, {"sampling": True}]
)
def test_generation_is_that_of_transformers(model, options):
    options = {"do_sample": options.get("sampling", False), **options}
    options.pop("sampling", None)
    if options.pop("assistant", False):
        options["assistant_model"] = zoo.build("llama-gqa")
    if lookup := options.pop("prompt_lookup", 0):
        options["prompt_lookup_num_tokens"] = lookup
    batch = zoo.batch(1, 40, (0,)) if "num_beams" not in options else zoo.batch()
    options |= {"max_new_tokens": 12}
    torch.manual_seed(0)
    want = model.generate(**batch, **options)
    torch.manual_seed(0)
    got = model.generate(**batch, **options, past_key_values=kvloom.Cache(model, "full"))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "recipe",
    [
        "h2o:tokens=24", "snapkv:tokens=24,window=8", "streaming:tokens=24,sinks=4",
        "kivi:group=16,residual=16", "near-lossless:group=16,residual=16,compress_after=70", *READ,
    ],
)  # fmt: skip
def test_drafts_change_no_token(model, recipe):
    """The assistant is the model itself, so that drafts are accepted."""
    batch = zoo.batch(1, 60, (0,))
    options = {"max_new_tokens": 16, "do_sample": False}
    want = model.generate(**batch, **options, past_key_values=kvloom.Cache(model, recipe))
    options["assistant_model"] = copy.deepcopy(model)
    got = model.generate(**batch, **options, past_key_values=kvloom.Cache(model, recipe))
    assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", ["near-lossless:group=16,residual=16", "h2o:tokens=24", *READ])
def test_a_saved_cache_continues(model, recipe, tmp_path):
    cache = filled(model, recipe)
    cache.save(tmp_path / "cache")
    loaded = kvloom.Cache.load(model, tmp_path / "cache")
    for ids in (torch.tensor([[5]]), torch.tensor([[6, 7]])):
        got, want = (model(ids, past_key_values=x).logits for x in (loaded, cache))
        assert torch.equal(got, want)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("recipe", ["full", "snapkv:tokens=20,window=8", "h2o:tokens=24"])
def test_a_step_that_fails_is_undone(model, recipe, tokens):
    cache = filled(model, recipe)
    before = copy.deepcopy(cache)

    def fail(*_):
        raise KeyboardInterrupt

    ids = torch.arange(5, 5 + tokens)[None]
    for module in (model.model.layers[-1].mlp, model.model.layers[1].self_attn.kv_b_proj):
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(ids, past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == 61
    got, want = (model(ids, past_key_values=x).logits for x in (cache, before))
    assert torch.equal(got, want)


@pytest.mark.rare
def test_an_error_between_storing_and_attention_keeps_its_name(model):
    cache = filled(model, "near-lossless:group=16,residual=16")

    def fail(*_):
        raise ValueError("my adapter failed")

    hook = model.model.layers[1].self_attn.kv_b_proj.register_forward_hook(fail)
    with pytest.raises(ValueError, match="my adapter failed"):
        model(torch.tensor([[5]]), past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == 61


def test_rows_of_a_batch_move(model):
    cache = kvloom.Cache(model, "kivi:group=16,residual=16")
    model(**zoo.batch(), past_key_values=cache)
    other = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    mask = torch.cat([zoo.batch()["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    order = [2, 0, 1]
    ids = torch.tensor([[5], [6], [7]])
    got = model(ids[order], attention_mask=mask[order], past_key_values=cache).logits
    want = model(ids, attention_mask=mask, past_key_values=other).logits
    torch.testing.assert_close(got, want[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("skvq:group=16", "calibration of keys and values, and this model stores latents"),
        ("expected:tokens=24,recent=8", "queries of latents .* use another score"),
        ("quest:tokens=24,page=4,recent=4,tier=host", "a tier takes keys and values with equally"),
    ],
)
def test_recipes_that_latents_lack_are_refused_by_name(model, recipe, says):
    with pytest.raises(IncompatibleRecipe, match=says):
        kvloom.Cache(model, recipe)


@pytest.mark.parametrize("how", ["wrapped", "offloaded"])
def test_weights_that_cannot_be_absorbed_are_refused_by_name(how):
    model = zoo.build("deepseek-v3")
    module = model.model.layers[0].self_attn
    if how == "wrapped":
        module.kv_b_proj = nn.Sequential(module.kv_b_proj)
    else:
        accelerate.cpu_offload(model, torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="keep kv_b_proj unquantized and in memory"):
        kvloom.Cache(model, "full")
