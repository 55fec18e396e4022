"""What tools ask of a model: whether it is supported, what it caches, and a forward pass."""

from __future__ import annotations

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.hf import geometry, read_tokens, stock_kinds, supported_model

pytestmark = by_reference


def test_a_supported_model_is_returned_without_its_wrapper():
    model = zoo.build("llama-gqa")
    assert supported_model(torch.compile(model), all_heads_for="a test") is model
    with pytest.raises(kvloom.UnsupportedModel, match="expected a transformers PreTrainedModel"):
        supported_model(torch.nn.Linear(1, 1))


def test_a_geometry_has_the_windows_of_sliding_attention():
    model = zoo.build("llama-gqa")
    assert stock_kinds(model) == ["full_attention"] * geometry(model).layers
    assert geometry(model).sliding == ()
    model = zoo.build("gemma4-shared")
    kinds, layers = stock_kinds(model), geometry(model).sliding
    # Transformers 5.10 makes no layer where a layer shares those of an earlier one.
    assert set(kinds) - {"DummyLayer"} == {"full_attention", "sliding_attention"}
    assert [layer.layer_index for layer in layers] == [
        i for i, kind in enumerate(kinds) if kind == "sliding_attention"
    ]
    assert {layer.window for layer in layers} == {24}
    assert {layer.geometry.layer_token_nbytes() for layer in layers} == {2 * 2 * 16 * 4}
    assert geometry(model).layer_token_nbytes() == 2 * 2 * 32 * 4


def test_tokens_are_read_into_a_cache():
    model, ids = zoo.build("llama-gqa"), zoo.batch(2, 12, (0, 0))["input_ids"]
    with torch.inference_mode():
        want = model(input_ids=ids).logits
        cache = kvloom.Cache(model, "full")
        torch.testing.assert_close(read_tokens(model, ids[:, :8], cache), want[:, 7])
        rest = read_tokens(model, ids[:, 8:], cache, all_logits=True)
    torch.testing.assert_close(rest, want[:, 8:])
