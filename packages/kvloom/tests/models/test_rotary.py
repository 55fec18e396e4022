"""Every model's rotary embedding is found out, or refused by name."""

from __future__ import annotations

import pytest
import torch
import zoo

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
NONE = ("gpt2", "opt", "mpt", "falcon-alibi", "bloom")


@pytest.mark.parametrize("name", [n for n in zoo.CONFIGS if n not in NONE])
def test_keys_of_a_shifted_prompt_are_the_turned_keys(name):
    full = {"layer_types": ["full_attention"]} if name in ("gemma3", "gemma4-shared") else {}
    full |= {"num_kv_shared_layers": 0} if name == "gemma4-shared" else {}
    model = zoo.build(name, num_hidden_layers=1, **full)
    found = model_rope(model)
    ids = zoo.batch(1, 9, (0,))["input_ids"]
    held = []
    for start in (0, 31):
        places = torch.arange(start, start + 9)[None]
        layer = model(ids, position_ids=places, use_cache=True).past_key_values.layers[0]
        held.append(layer.values if name == "deepseek-v3" else layer.keys)  # behind the latents
    turned = found.rotate(held[0], torch.full((1, 1, 9), 31))
    torch.testing.assert_close(turned, held[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(held[0], held[1], atol=1e-2)


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
