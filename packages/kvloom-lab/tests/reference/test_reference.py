"""The reference model: its text, its tasks, its weights."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kvloom_lab.models import WEIGHTS, reference_model, reference_tokenizer
from kvloom_lab.workload.text import held_out_documents, library_text, train_documents
from reference_model import attention, data, tasks

needs_weights = pytest.mark.skipif(
    not (WEIGHTS / "model.safetensors").exists(), reason="weights not built yet"
)
pytestmark = needs_weights


@pytest.fixture(scope="module")
def tokenizer():
    return reference_tokenizer()


@pytest.fixture(scope="module")
def model():
    return reference_model()


def test_importing_the_package_is_light():
    code = "import sys, kvloom_lab; print({'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_shipped_files_stay_small():
    sizes = {p.name: p.stat().st_size for p in WEIGHTS.iterdir()}
    assert sum(sizes.values()) <= 12e6
    assert sum(n for name, n in sizes.items() if name.endswith(".png")) <= 200e3


def test_held_out_documents_are_not_trained_on():
    held_out = {d.name for d in held_out_documents()}
    assert held_out
    assert not held_out & {d.name for d in train_documents()}
    assert len(library_text()) > 100_000


def test_tokenizer_puts_bos_first_and_parts_digits(tokenizer):
    ids = tokenizer("number 1234567").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert [tokenizer.decode(i) for i in ids[-7:]] == list("1234567")
    assert tokenizer.pad_token_id is not None
    assert tokenizer.eos_token_id is not None


def test_text_survives_the_tokenizer(tokenizer):
    text = "def f(x):\n    return 'é→' + x  # 3.14\n\n"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("context_tokens", [128, 513, 2048])
def test_needle_has_the_length_and_the_answer(tokenizer, context_tokens):
    e = tasks.needle(tokenizer, context_tokens=context_tokens, seed=3)
    assert len(e.prompt_ids) == context_tokens
    assert e.prompt_ids[0] == tokenizer.bos_token_id
    assert e.prompt_ids[e.answer_at : e.answer_at + 7] == e.answer_ids
    said = tokenizer.decode(e.prompt_ids)
    assert f"The magic number for {e.key} is {tokenizer.decode(e.answer_ids)}." in said
    assert said.endswith(f"Question: The magic number for {e.key} is ")


def test_tasks_are_decided_by_the_seed(tokenizer):
    one, same, other = (tasks.needle(tokenizer, context_tokens=300, seed=s) for s in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_goes_where_it_is_told(tokenizer, depth):
    e = tasks.needle(tokenizer, context_tokens=4096, depth=depth, seed=5)
    assert e.depth == pytest.approx(depth, abs=0.08)


@pytest.mark.parametrize(
    "make", [tasks.needle_set, tasks.key_value_set, tasks.copy_set, tasks.variable_set]
)
def test_sets_hold_what_they_ask_for(tokenizer, make):
    c = make(tokenizer, context_tokens=1000, seed=4)
    assert len(c.context_ids) == 1000
    assert c.questions
    for q in c.questions:
        assert c.context_ids[q.answer_at : q.answer_at + len(q.answer_ids)] == q.answer_ids


def test_too_small_a_context_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"use \d+ or more"):
        tasks.needle_set(tokenizer, context_tokens=50, n_keys=8)


@pytest.mark.parametrize("kind", list(data.MIX))
def test_training_rows_are_whole(tokenizer, kind):
    encode = tasks.Encoder(tokenizer, tasks.held_out_encoder(tokenizer).text_ids)
    for seed, tokens in ((0, 257), (1, 513), (2, 1025)):
        ids, weights = data.row(encode, np.random.default_rng(seed), kind, tokens)
        assert ids.shape == weights.shape == (tokens,)
        assert (weights == data.ANSWER).any() == (kind != "text")


@pytest.mark.parametrize("T", [1, 100, 256, 300])
def test_training_attention_is_causal_attention(T):
    q, k, v = (
        torch.randn(2, h, T, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)
    )
    told = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(attention.causal_attention(q, k, v), told)


def test_model_is_the_llama_it_says(model):
    c = model.config
    assert c.model_type == "llama"
    assert c.num_hidden_layers >= 6
    assert c.head_dim == 64
    assert c.num_attention_heads >= 2 * c.num_key_value_heads
    assert c.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert reference_model(torch.float32).dtype == torch.float32


def test_model_finds_needles(model, tokenizer):
    from reference_model.evaluate import answered

    examples = [tasks.needle(tokenizer, context_tokens=512, seed=s) for s in range(10)]
    assert sum(answered(model, examples)) >= 9


def test_model_knows_its_text(model, tokenizer):
    ids = torch.tensor([tokenizer(library_text()[200_000:206_000]).input_ids])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 3.5
