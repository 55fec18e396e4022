"""The task of a comparison: rows of text, settings, and what a model has room for."""

import numpy as np
import pytest
import torch
from numbered_lines import TEXT
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
)

from kvloom.errors import InputError
from kvloom_lab import eval as work
from kvloom_lab.eval import Settings
from kvloom_lab.eval.tables import comparison_table
from kvloom_lab.workload.text import cut_rows, leading_ids, library_text, tokenize


def test_rows_come_from_parts_of_the_text_and_begin_with_the_opening(tokenizer):
    ids = np.arange(1000)
    rows = cut_rows(ids, [7], batch=3, tokens=101, seed=0)
    assert rows.shape == (3, 101)
    assert rows[:, 0].tolist() == [7, 7, 7]
    begins = rows[:, 1].tolist()
    assert [b // 333 for b in begins] == [0, 1, 2]
    assert all(
        row[1:].tolist() == list(range(b, b + 100)) for row, b in zip(rows, begins, strict=True)
    )
    assert not torch.equal(rows, cut_rows(ids, [7], batch=3, tokens=101, seed=1))
    short = cut_rows(np.arange(120), [], batch=3, tokens=100, seed=0)
    assert short[0, 0] < short[-1, 0]
    with pytest.raises(InputError, match="the text has 99 tokens"):
        cut_rows(np.arange(99), [], batch=1, tokens=100, seed=0)


def test_long_text_is_tokenized_whole(tokenizer):
    ids = tokenize(tokenizer, TEXT * 3)
    assert tokenizer.decode(ids) == TEXT * 3
    assert leading_ids(tokenizer) == [tokenizer.bos_token_id]


def test_the_context_fits_the_models_positions(tokenizer):
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=32, n_layer=1, n_head=1)
    small = GPT2LMHeadModel(config).eval()
    task = work.prepare(small, tokenizer, TEXT, Settings(new_tokens=60, batch=1, questions=4))
    assert task.context == 512 - 64
    assert work.compare(small, ["kivi:residual=32"], task)[1].problem is None
    with pytest.raises(InputError, match="use a context of 448 or less"):
        work.prepare(small, tokenizer, TEXT, Settings(context=500, new_tokens=60))


def test_sliding_layers_count_in_memory_and_not_in_bits(tokenizer):
    """Layers that transformers bounds itself are no smaller; with no others, nothing is."""
    common = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "sliding_window": 64,
    }  # fmt: skip
    mixed = Gemma3TextConfig(**common, layer_types=["sliding_attention", "full_attention"])
    settings = Settings(context=150, new_tokens=32, batch=1, questions=2)
    for config in (mixed, MistralConfig(**common)):
        model = AutoModelForCausalLM.from_config(config).eval()
        task = work.prepare(model, tokenizer, TEXT, settings)
        full, rtn = work.compare(model, ["rtn"], task)
        if config is mixed:
            stock = 2 * 63 * 32 * 4
            values = 2 * 182 * 32
            assert rtn.kv_bytes == pytest.approx(stock + rtn.bits_per_value * values / 8, rel=0.02)
            assert full.kv_bytes > 1.5 * rtn.kv_bytes
        else:
            assert full.bits_per_value is None
            assert full.times_smaller == 1
            assert "no layer of the model has plain full attention" in rtn.problem
        console = Console(width=100)
        with console.capture() as captured:
            console.print(comparison_table([full, rtn], work.environment(model, "m", task, 0)))
        assert "rtn" in captured.get()


@pytest.mark.parametrize("wrong", [{"new_tokens": 8}, {"batch": 0}, {"context": 0}, {"seed": -1}])
def test_settings_out_of_range(wrong):
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name}=.* or more"):
        Settings(**wrong)


def test_library_text_is_there():
    assert len(library_text()) > 100_000
