"""A model whose other layers store a recurrent state: it follows, or is refused by name."""

import copy

import pytest
import torch
import transformers as tf
import zoo

import kvloom
from backends import by_reference
from kvloom.errors import CacheMisuse, SavedCacheError

pytestmark = [by_reference, pytest.mark.filterwarnings("ignore")]

GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = tf.Qwen3NextConfig(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=199, max_position_embeddings=1024,
        num_experts=4, num_experts_per_tok=2, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=16, linear_value_head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 16}])
def test_full_gives_the_tokens_of_plain_transformers(model, options):
    prompt = zoo.batch(1, 61, (0,)) if "prefill_chunk_size" in options else zoo.batch()
    expected = model.generate(**prompt, **GREEDY, **options).sequences
    report = kvloom.attach(model, "full")
    assert torch.equal(model.generate(**prompt, **GREEDY, **options).sequences, expected)
    assert report.compressed == (3,)
    assert "recurrent state, not keys" in str(report)


def test_what_a_recurrent_state_cannot_follow_is_refused_and_changes_nothing(model, tmp_path):
    kvloom.attach(model, "full")
    cache = model.generate(**zoo.batch(), **GREEDY).past_key_values
    before = copy.deepcopy(cache)
    with pytest.raises(CacheMisuse, match="crop cannot take tokens back out of the recurrent"):
        cache.crop(-2)
    with pytest.raises(CacheMisuse, match="batch_repeat_interleave: a LinearAttentionLayer"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(SavedCacheError, match="LinearAttentionLayer: kvloom cannot save"):
        cache.save(tmp_path / "cache.kv")
    token = {"input_ids": torch.full((3, 1), 7), "attention_mask": torch.ones(3, 70)}
    with torch.no_grad():
        logits = [model(**token, past_key_values=x).logits for x in (cache, before)]
    assert torch.equal(*logits)
