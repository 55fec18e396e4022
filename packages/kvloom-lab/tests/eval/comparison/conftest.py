"""A tokenizer, a tiny Llama with random weights, and a comparison on them."""

import pytest
import torch
from numbered_lines import TEXT, WORDS
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from kvloom_lab import eval as work
from kvloom_lab.eval import Settings
from reference_model.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT, WORDS, "The magic number for Question"] * 3, 600)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def task(model, tokenizer):
    settings = Settings(context=200, new_tokens=40, batch=2, questions=3)
    return work.prepare(model, tokenizer, TEXT, settings)


@pytest.fixture(scope="module")
def rows(model, tokenizer, task):
    specs = ["kivi:group=32,residual=32", "window:tokens=24", "kivi:group=64", "full"]
    return work.compare(model, specs, task)
