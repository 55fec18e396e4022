"""First prompts whose tokens see later ones, as the tokens of an image do."""

from __future__ import annotations

import pytest
import torch
import zoo
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama

import kvloom
from kvloom.errors import CacheMisuse

RECIPES = [
    "full", "near-lossless:group=16,residual=16", "kivi:group=16,residual=16",
    "quest:tokens=96,page=4,sinks=2,recent=4,full_layers=0", "streaming:tokens=40,sinks=4",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad():
        yield


@pytest.fixture
def model(monkeypatch):
    """A Llama in whose prompts the tokens 44 to 55 are an image and see each other."""

    def in_image(row, head, q, k):
        return (q >= 44) & (q < 56) & (k >= 44) & (k < 56)

    def mask(**arguments):
        return create_causal_mask(**arguments, or_mask_function=in_image)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
    return zoo.build("llama-gqa")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_prompt_is_that_of_transformers(model, recipe, monkeypatch):
    batch = zoo.batch()
    real = batch["attention_mask"].bool()
    want = model(**batch).logits
    got = model(**batch, past_key_values=kvloom.Cache(model, recipe)).logits
    assert torch.equal(got[real], want[real])
    monkeypatch.undo()
    assert not torch.allclose(model(**batch).logits[real], want[real], atol=1e-2)


@pytest.mark.parametrize("recipe", ["full", RECIPES[3]])
def test_tokens_are_those_of_transformers(model, recipe):
    options = {"max_new_tokens": 12, "do_sample": False}
    for batch in (zoo.batch(), zoo.batch(1, 61, (0,))):
        want = model.generate(**batch, **options)
        got = model.generate(**batch, **options, past_key_values=kvloom.Cache(model, recipe))
        assert torch.equal(got, want)


@pytest.mark.parametrize("recipe", ["h2o:tokens=24", "snapkv:tokens=24,window=8", "small"])
def test_scores_that_do_not_know_the_mask_are_refused_by_name(model, recipe):
    cache = kvloom.Cache(model, recipe)
    with pytest.raises(CacheMisuse, match=r'use a recipe without scores .* "near-lossless"'):
        model(**zoo.batch(), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_later_turn_is_refused_by_name(model):
    ids, cache = zoo.batch(1, 61, (0,))["input_ids"], kvloom.Cache(model, "full")
    model(ids[:, :40], past_key_values=cache)
    with pytest.raises(CacheMisuse, match="tokens of this input see later ones"):
        model(ids[:, 40:], past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_a_mask_that_hides_stored_tokens_is_refused_by_name(model, monkeypatch):
    """Of a step of one token, too: later tokens must see all earlier ones but padding."""
    ids, cache = zoo.batch(1, 61, (0,))["input_ids"], kvloom.Cache(model, "full")
    model(ids, past_key_values=cache)

    def mask(**arguments):
        return create_causal_mask(**arguments, and_mask_function=lambda row, head, q, k: k > 5)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
    with pytest.raises(CacheMisuse, match="tokens of this input see later ones, or not all"):
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 61
