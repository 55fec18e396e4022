"""Layers that share the keys and values of another: one stored layer serves several."""

from __future__ import annotations

import copy

import pytest
import torch
import zoo

import kvloom
from kvloom.errors import CacheMisuse
from kvloom.hf.routed_layer import RoutedLayer

RECIPES = [
    "full", "near-lossless:group=16,residual=16", "kivi:group=16,residual=16",
    "snapkv:tokens=20,window=8", "snapkv:tokens=20,window=8,head_share=0.2,layers=joint",
    "h2o:tokens=24", "quest:tokens=24,page=4,sinks=2,recent=4,full_layers=0", "rtn:group=16",
    "small:fraction=0.5,group=16,residual=16,recent=8", "streaming:tokens=24,sinks=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return zoo.build("gemma4-shared")


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


def stored(cache):
    return [layer for layer in cache.layers if isinstance(layer, RoutedLayer)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prompt_attends_exactly_in_every_layer(model, recipe):
    """No layer packs or drops a token before the layers that share it have attended."""
    batch = zoo.batch()
    want = model(**batch).logits
    cache = kvloom.Cache(model, recipe)
    got = model(**batch, past_key_values=cache).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-5)
    assert [layer.shared for layer in stored(cache)] == [False, True]
    assert len(stored(cache)) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_within_inference_mode(model, recipe):
    batch, logits = zoo.batch(1, 40, (0,)), []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = kvloom.Cache(model, recipe)
        with mode():
            for ids in batch["input_ids"].split([37, 1, 1, 1], dim=1):
                out = model(ids, past_key_values=cache).logits
        logits.append(out)
    assert torch.equal(*logits)


def test_bytes_are_counted_once(model):
    batch = zoo.batch(1, 40, (0,))
    cache = kvloom.Cache(model, "full")
    model(**batch, past_key_values=cache)
    full, sliding = 2 * 2 * 32 * 4, 2 * 2 * 16 * 4  # bytes of a token's keys and values
    in_window = min(40, model.config.sliding_window - 1)
    assert cache.nbytes == cache.full_nbytes == 40 * 2 * full + in_window * sliding


def test_steps_behind_a_recall_of_all_tokens_are_exact(model):
    """Each of the layers that share tokens chooses by its own queries."""
    batch = zoo.batch(1, 61, (0,))
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    settings |= {"output_logits": True}
    want = model.generate(**batch, **settings)
    recipe = "quest:tokens=96,page=4,sinks=2,recent=4,full_layers=0"
    got = model.generate(**batch, **settings, past_key_values=kvloom.Cache(model, recipe))
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("recipe", ["full", "snapkv:tokens=20,window=8", "h2o:tokens=24"])
def test_a_step_that_fails_in_a_sharing_layer_leaves_the_cache_as_it_was(model, recipe):
    batch = zoo.batch(1, 61, (0,))
    cache = kvloom.Cache(model, recipe)
    model(**batch, past_key_values=cache)
    before = copy.deepcopy(cache)
    last = model.model.layers[-1].mlp

    def fail(*_):
        raise KeyboardInterrupt

    ids = torch.tensor([[5, 6]])
    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(input_ids=ids, past_key_values=cache)
    handle.remove()
    assert cache.get_seq_length() == 61
    got, want = (model(input_ids=ids, past_key_values=x).logits for x in (cache, before))
    assert torch.equal(got, want)


def test_a_saved_cache_continues(model, tmp_path):
    batch = zoo.batch(1, 61, (0,))
    cache = kvloom.Cache(model, "snapkv:tokens=20,window=8")
    model(**batch, past_key_values=cache)
    cache.save(tmp_path / "cache")
    loaded = kvloom.Cache.load(model, tmp_path / "cache")
    ids = torch.tensor([[5]])
    got, want = (model(input_ids=ids, past_key_values=x).logits for x in (loaded, cache))
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "recipe",
    [*(["full"] if zoo.RECORDS else []), "near-lossless:group=16,residual=16", "h2o:tokens=24"],
)
def test_a_draft_that_is_read_token_by_token_is_refused_by_name(model, recipe):
    assistant, cache = zoo.build("llama-gqa"), kvloom.Cache(model, recipe)
    options = {**zoo.batch(1, 40, (0,)), "max_new_tokens": 8, "do_sample": False}
    if recipe == "full":
        want = model.generate(**options)
        got = model.generate(**options, assistant_model=assistant, past_key_values=cache)
        assert torch.equal(got, want)
        return
    with pytest.raises(CacheMisuse, match=r"other layers share .* use no draft, or recipe full"):
        model.generate(**options, assistant_model=assistant, past_key_values=cache)


def test_gradients_of_a_first_call(model):
    ids, losses = zoo.batch(1, 40, (0,))["input_ids"], []
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.enable_grad():
        for cache in (None, kvloom.Cache(model, "full")):
            loss = model(ids, past_key_values=cache, use_cache=cache is not None).logits.sum()
            losses.append(torch.autograd.grad(loss, weight)[0])
    torch.testing.assert_close(*losses)
