"""A text, its tokenizer, and models small enough to do a whole command's work in a second."""

from __future__ import annotations

from functools import cache

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from reference_model.tokenizer import train_tokenizer

TEXT = "".join(f"line {i}: the magic number is {i * 7919}, for now.\n" for i in range(500))


@cache
def tokenizer():
    return train_tokenizer([TEXT, "The magic number for Question:"] * 3, 400)


def llama(**sizes) -> LlamaForCausalLM:
    """A model that reads `tokenizer`'s tokens, its weights large enough that attention differs."""
    torch.manual_seed(0)
    usual = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}  # fmt: skip
    config = LlamaConfig(
        vocab_size=len(tokenizer()), intermediate_size=48, initializer_range=0.3,
        bos_token_id=1, eos_token_id=None, pad_token_id=0, **(usual | sizes),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gemma(window: int) -> Gemma3ForCausalLM:
    """A model of the same tokens, two of whose three layers have a sliding window."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer()), hidden_size=64, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        sliding_window=window, initializer_range=0.3, bos_token_id=1, eos_token_id=None,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()
