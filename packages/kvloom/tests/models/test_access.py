"""What tools ask of a model: whether it is supported, what it caches, and a forward pass."""

from __future__ import annotations

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.hf import geometry, read_tokens, stock_layers, supported_model

pytestmark = by_reference


def test_a_supported_model_is_returned_without_its_wrapper():
    model = zoo.build("llama-gqa")
    assert supported_model(torch.compile(model), needs_all_heads="a test") is model
    with pytest.raises(kvloom.UnsupportedModel, match="expected a transformers PreTrainedModel"):
        supported_model(torch.nn.Linear(1, 1))


def test_stock_layers_have_the_window_of_sliding_attention():
    model = zoo.build("llama-gqa")
    nbytes = geometry(model).layer_token_nbytes()
    assert stock_layers(model) == [("full_attention", None, nbytes)] * geometry(model).layers
    layers = stock_layers(zoo.build("gemma4-shared"))
    heads = {
        "full_attention": 2 * 2 * 32 * 4, "sliding_attention": 2 * 2 * 16 * 4, "DummyLayer": 0,
    }  # fmt: skip
    assert [layer.token_nbytes for layer in layers] == [heads[layer.kind] for layer in layers]
    assert {layer.window for layer in layers} == {None, 24}


def test_tokens_are_read_into_a_cache():
    model, ids = zoo.build("llama-gqa"), zoo.batch(2, 12, (0, 0))["input_ids"]
    with torch.inference_mode():
        want = model(input_ids=ids).logits
        cache = kvloom.Cache(model, "full")
        torch.testing.assert_close(read_tokens(model, ids[:, :8], cache), want[:, 7])
        rest = read_tokens(model, ids[:, 8:], cache, all_logits=True)
    torch.testing.assert_close(rest, want[:, 8:])
