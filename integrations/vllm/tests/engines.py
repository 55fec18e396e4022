"""vLLM engines on the reference model, and the same tokens from kvloom's cache in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

import kvloom
from kvloom.reference import WEIGHTS
from kvloom_vllm.rule import paged

MIB = 1 << 20


@contextmanager
def engine(recipe: str | None, **options: Any) -> Iterator[Any]:
    """Run vLLM on the reference model in fp32 with a recipe, in a process of its own, and end it."""
    from vllm import LLM

    settings = {
        "model": str(WEIGHTS), "dtype": "float32", "enforce_eager": True, "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 * MIB, "max_num_batched_tokens": 8192, "seed": 0,
        "enable_prefix_caching": False, "disable_log_stats": True,
        "additional_config": {} if recipe is None else {"kvloom": recipe},
    }  # fmt: skip
    llm = LLM(**settings | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: Sequence[list[int]], new: int, **sampling: Any) -> list[list[int]]:
    """Return `new` greedy tokens for each prompt."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, **sampling)
    found = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False
    )
    return [list(one.outputs[0].token_ids) for one in found]


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return prompts of these lengths, pieces of English text, each at a place of its own."""
    text = _text()
    generator = torch.Generator().manual_seed(seed)
    begins = torch.randint(0, len(text) - max(lengths), (len(lengths),), generator=generator)
    return [
        text[begin : begin + n] for begin, n in zip(begins.tolist(), lengths, strict=True)
    ]


def mixed_lengths(count: int, longest: int, seed: int = 0) -> list[int]:
    """Return lengths from 1 to `longest`, page ends among them."""
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(1, longest, (count,), generator=generator).tolist()
    ends = [1, 127, 128, 129, 255, 256, 257]
    return [*ends, *some][:count]


def in_transformers(
    recipe: str, prompt: Sequence[int], new: int, *, page: int = 128, cuts: Sequence[int] = ()
) -> list[int]:
    """Return `new` greedy tokens of a prompt by kvloom's cache that packs as vLLM's pages.

    cuts: where the prompt was cut into chunks.
    """
    model = _model()
    past = kvloom.Cache(model, paged(recipe, page))
    ends = [*cuts, len(prompt)]
    begins = [0, *cuts]
    ids = torch.tensor([list(prompt)])
    found: list[int] = []
    with torch.no_grad():
        for begin, end in zip(begins, ends, strict=True):
            logits = model(ids[:, begin:end], past_key_values=past).logits
        while True:
            found.append(int(logits[0, -1].argmax()))
            if len(found) == new:
                return found
            logits = model(torch.tensor([found[-1:]]), past_key_values=past).logits


@cache
def _model() -> Any:
    return kvloom.reference_model(torch.float32)


@cache
def _text() -> list[int]:
    license_text = (WEIGHTS / "README.md").read_text(encoding="utf-8")
    tokenizer = kvloom.reference_tokenizer()
    ids = tokenizer(license_text, add_special_tokens=False)["input_ids"]
    while len(ids) < 8000:
        ids = ids + ids[::-1]
    return ids
