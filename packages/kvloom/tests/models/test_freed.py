"""After a prompt, the memory that it freed goes back to the operating system."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import zoo

import kvloom
from kvloom.hf import freed
from kvloom.hf import read_tokens as forward


def test_a_long_prompt_returns_what_it_freed_and_a_step_does_not(monkeypatch):
    calls = []
    monkeypatch.setattr(freed, "_trim", lambda: calls.append)
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, "full")
    ids = torch.randint(1, 64, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for tokens, called in ((256, 1), (1, 1), (43, 1)):
            forward(model, ids[:, :tokens], cache)
            assert len(calls) == called


def live_tensors() -> list[torch.Tensor]:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of objects that only isinstance touches
        return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def live_bytes() -> dict[int, int]:
    """The bytes of each storage of a tensor that lives, by its address."""
    tensors = live_tensors()
    storages = [x.untyped_storage() for x in tensors if x.layout is torch.strided]
    return {x.data_ptr(): x.nbytes() for x in storages if x.device.type == "cpu"}


@pytest.mark.parametrize("recipe", [
    "full", "kivi:group=32,residual=32", "h2o:fraction=0.25", "keyformer:fraction=0.25",
    "vatp:fraction=0.25", "window:tokens=60", "streaming:tokens=60", "snapkv:fraction=0.25",
    "minikv:residual=32", "small:recent=16", "tiny:recent=16", "triattention:fraction=0.25",
    "quest:tokens=96,page=8", "clusterkv:tokens=64,size=8", "kvzip:fraction=0.3",
])  # fmt: skip
def test_a_cache_holds_no_tensor_that_it_does_not_count(recipe):
    model = zoo.build("llama-gqa", head_dim=32)
    ids = zoo.batch(1, 400, (0,))["input_ids"]
    with torch.no_grad():
        model(ids, past_key_values=kvloom.Cache(model, recipe))  # what is kept for each model
        cache, before = kvloom.Cache(model, recipe), live_bytes()
        for tokens in (ids, ids[:, :1], ids[:, :9], ids[:, :1]):
            model(tokens, past_key_values=cache)
            live = live_bytes()
            held = sum(n for address, n in live.items() if address not in before)
            assert held <= cache.nbytes + 3 * 1024 + 8  # scratch of each layer, hash of ids


def test_within_the_step_of_a_prompt_kept_tokens_are_held_once():
    model, alive = zoo.build("llama-gqa"), []

    def after_layer(*_):
        alive.append([x for x in live_tensors() if x.dim() == 4 and x.shape[2] == 90])

    model.model.layers[1].register_forward_hook(after_layer)
    cache = kvloom.Cache(model, "h2o:tokens=90")
    with torch.no_grad():
        model(torch.randint(3, 199, (1, 200)), past_key_values=cache)
    assert alive == [[]]  # slots have room for one more
