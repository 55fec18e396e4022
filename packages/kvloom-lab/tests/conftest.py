"""What tests of the command line read: a saved model, texts, and files that are neither.

Fixtures import transformers: pytest-xdist loads this file before it starts the test processes.
"""

from __future__ import annotations

import json
import shutil

import pytest

from floor import short_prompts_evict

__all__ = ["short_prompts_evict"]


@pytest.fixture(scope="module")
def tokenizer():
    """The tokenizer of the tiny models."""
    import tiny

    return tiny.tokenizer()


@pytest.fixture(scope="module")
def model():
    """A tiny Llama of the module that asks for it."""
    import tiny

    return tiny.llama()


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    """A folder with a saved model, damaged ones, a text, an empty file and one that is no text."""
    from transformers import T5Config, T5ForConditionalGeneration

    import tiny

    folder = tmp_path_factory.mktemp("here")
    model = tiny.llama(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=1024,
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    t5 = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(t5).save_pretrained(folder / "t5")
    for name in ("model", "t5"):
        tiny.tokenizer().save_pretrained(folder / name)
    (folder / "no-model").mkdir()
    shutil.copytree(folder / "model", folder / "cut")
    weights = folder / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    shutil.copytree(folder / "model", folder / "untyped")
    (folder / "untyped" / "config.json").write_text(json.dumps({"hidden_size": 32}))
    (folder / "text.txt").write_text(tiny.TEXT)
    (folder / "short.txt").write_text("a few words\n")
    (folder / "empty.txt").write_text("\n")
    (folder / "no-recipe.toml").write_text("[stor]\n")
    (folder / "bytes.bin").write_bytes(b"\xff\xfe\x00\x81")
    return folder
