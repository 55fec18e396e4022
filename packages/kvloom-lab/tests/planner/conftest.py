"""Fixtures of the planner's tests."""

import pytest
import torch
import transformers as tf


@pytest.fixture(scope="module")
def llama():
    """The config of Llama-3.1-8B's shape, with 4 of its layers."""
    return tf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        dtype=torch.bfloat16,
    )  # fmt: skip
