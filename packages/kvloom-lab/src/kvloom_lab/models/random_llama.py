"""A Llama with random weights: speed does not depend on them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..workload.shapes import ModelShape

_EXTRA_POSITIONS = 4096  # after the longest context, for the decode steps


def random_llama(shape: ModelShape, longest: int) -> LlamaForCausalLM:
    """Return a model on torch's default device, for contexts of up to `longest` tokens."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=longest + _EXTRA_POSITIONS,
        attn_implementation="sdpa",
        dtype=shape.dtype,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)
