"""Prompts of bf16 models, whose attention has a kernel: as near to fp32 as plain transformers."""

from __future__ import annotations

import pytest
import torch
import zoo
from transformers import DynamicCache

import kvloom
from backends import by_reference
from kvloom.kernels import dispatch, operations_run


@by_reference  # which the test overrides
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt-oss", "gemma3", "gpt2"])
def test_logits_are_as_near_to_fp32_as_those_of_transformers(name, padded):
    changes = {"n_embd": 128} if name == "gpt2" else {"head_dim": 32}
    model = zoo.build(name, **changes)
    inputs = zoo.batch() if padded else {"input_ids": zoo.batch()["input_ids"]}
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    with torch.no_grad(), dispatch.use("auto"):
        exact = model(**inputs).logits[real]
        model = model.bfloat16()
        plain = model(**inputs, past_key_values=DynamicCache(config=model.config)).logits[real]
        before = operations_run()
        cache = kvloom.Cache(model, "full")
        full = model(**inputs, past_key_values=cache).logits[real]
    assert any(op == "attend_prompt" for op, *_ in operations_run() - before)
    error, allowed = ((x.float() - exact).norm() for x in (full, plain))
    assert error < 1.2 * allowed
