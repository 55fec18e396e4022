"""After a prompt, the memory that it freed goes back to the operating system."""

from __future__ import annotations

import torch
import zoo

import kvloom
from kvloom.hf import freed
from kvloom.hf import read_tokens as forward


def test_a_long_prompt_returns_what_it_freed_and_a_step_does_not(monkeypatch):
    calls = []
    monkeypatch.setattr(freed, "_trim", lambda: calls.append)
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, "full")
    ids = torch.randint(1, 64, (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for tokens, called in ((256, 1), (1, 1), (43, 1)):
            forward(model, ids[:, :tokens], cache)
            assert len(calls) == called
