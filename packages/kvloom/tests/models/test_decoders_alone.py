"""Decoders of encoder-decoder models, alone, that differ from their encoder in layers and heads."""

from __future__ import annotations

import pytest
import torch
import transformers as tf

import kvloom
from backends import by_reference
from kvloom.hf import compat

pytestmark = by_reference


def build(name: str, encoder_layers: int, decoder_layers: int) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(tf, f"{name}Config")(
        vocab_size=199, d_model=64, encoder_layers=encoder_layers, decoder_layers=decoder_layers,
        encoder_attention_heads=8, decoder_attention_heads=4, encoder_ffn_dim=96,
        decoder_ffn_dim=96, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, is_decoder=True, is_encoder_decoder=False,
    )  # fmt: skip
    model = getattr(tf, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("name", ["Bart", "Pegasus", "BlenderbotSmall", "Mvp"])
@pytest.mark.parametrize("layers", [(6, 2), (1, 3)])
def test_the_decoders_layers_and_heads_count(name, layers):
    model = build(name, *layers)
    geometry = compat.geometry(model)
    assert (geometry.layers, geometry.q_heads, geometry.head_dim) == (layers[1], 4, 16)
    ids = torch.randint(3, 199, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        cache = kvloom.Cache(model, "full")
        got = torch.cat([model(x, past_key_values=cache).logits for x in ids.split(20, 1)], dim=1)
        torch.testing.assert_close(got, plain, atol=1e-4, rtol=1e-4)
        packed = kvloom.Cache(model, "kivi:group=16,residual=16")
        model(ids, past_key_values=packed)
    assert packed.nbytes == packed.recipe.nbytes(40, packed.geometry, batch=2)
    assert f"{layers[1]} of {layers[1]} layers compressed" in str(
        kvloom.attach(model, "kivi:group=16")
    )
