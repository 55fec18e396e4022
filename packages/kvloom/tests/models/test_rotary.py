"""Every model's rotary embedding is found out, or refused by name."""

from __future__ import annotations

import pytest
import torch
import zoo

import kvloom
import probe
from backends import by_reference
from kvloom.errors import UnsupportedModel
from kvloom.hf.rotary import model_rope

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
NONE = (*zoo.LEARNED, "mpt", "falcon-alibi", "bloom")


@pytest.mark.parametrize("name", [n for n in zoo.CONFIGS if n not in (*NONE, "mistral-sliding")])
def test_keys_of_a_repeated_prompt_are_the_turned_keys(name):
    full = {"layer_types": ["full_attention"]} if name.startswith("gemma") else {}
    full |= {"num_kv_shared_layers": 0} if name == "gemma4-shared" else {}
    model = zoo.build(name, num_hidden_layers=1, **full)
    ids = zoo.batch(1, 9, (0,))["input_ids"]
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        model(torch.cat([ids, ids[:, :4], ids], dim=1), past_key_values=cache)
    held = probe.oldest_keys(probe.layers(cache)[0], 22)
    turned = model_rope(model).rotate(held[:, :, :9], torch.full((1, 1, 9), 13))
    torch.testing.assert_close(turned, held[:, :, 13:], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(held[:, :, :9], held[:, :, 13:], atol=1e-2)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_frequencies(kind):
    model = zoo.build(
        "llama-gqa", rope_parameters={"rope_type": kind, "rope_theta": 1e4} | SCALED[kind]
    )
    assert not torch.equal(model_rope(model).inv_freq, model_rope(zoo.build("llama-gqa")).inv_freq)


@pytest.mark.parametrize("name", NONE)
def test_learned_positions_and_alibi_do_not_rotate(name):
    assert model_rope(zoo.build(name)) is None


def test_frequencies_that_change_are_refused():
    changing = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match=r"changes with the length.*positions=\"original\""):
        model_rope(zoo.build("llama-gqa", rope_parameters=changing))
