"""Perplexity and needles of recipes through vLLM, beside vLLM's own formats, as JSON.

    python benchmarks/quality.py --recipes none,fp8,near-lossless,balanced,kivi --out result.json

Prompts are computed in chunks of one page, so that all tokens but those of the newest page are read
as the format stores them. Perplexity is that of text behind --context tokens; a needle is a number
within --context tokens of text, which the answer must contain. `none` is vLLM without kvloom.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np

from throughput import folder

PAGE = 128  # tokens of a page, and of a chunk


def main() -> None:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, reference, or a folder")
    parser.add_argument("--recipes", default="none,fp8,near-lossless,balanced,kivi")
    parser.add_argument("--context", type=int, default=1024, help="tokens before what is scored")
    parser.add_argument("--new", type=int, default=128, help="tokens that perplexity scores")
    parser.add_argument("--texts", type=int, default=6, help="texts that perplexity scores")
    parser.add_argument("--needles", type=int, default=16)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model = folder(asked.model)
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for recipe in asked.recipes.split(","):
        with spawn.Pool(1) as pool:
            rows.append(pool.apply(measure, (model, recipe, vars(asked))))
        print(json.dumps(rows[-1]), flush=True)
    settings = {name: getattr(asked, name) for name in ("model", "context", "new", "texts")}
    found = {**settings, "dtype": "bfloat16", "chunk": PAGE, "engines": rows}
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def measure(model: str, recipe: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens that fit into 256 MiB, perplexity and needles found of one engine."""
    from vllm import LLM

    own = recipe in ("none", "fp8")
    llm = LLM(
        model, dtype="bfloat16", enforce_eager=True, block_size=PAGE, seed=0,
        max_model_len=asked["context"] + asked["new"] + PAGE, kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False, long_prefill_token_threshold=PAGE,
        max_num_batched_tokens=max(4096, 8 * PAGE), max_num_seqs=8,
        kv_cache_dtype="fp8" if recipe == "fp8" else "auto",
        additional_config={} if own else {"kvloom": recipe},
    )  # fmt: skip
    cache = llm.llm_engine.vllm_config.cache_config
    # imported late: vLLM does not start beside llvmlite
    from kvloom.workload.text import library_text, tokenize

    text = tokenize(llm.get_tokenizer(), library_text())
    return {
        "recipe": recipe, "tokens_that_fit": cache.num_gpu_blocks * cache.block_size,
        "perplexity": round(perplexity(llm, text, asked), 4), **needles(llm, text, asked),
    }  # fmt: skip


def perplexity(llm: Any, text: np.ndarray, asked: dict[str, Any]) -> float:
    """Return the perplexity of the last `new` tokens of texts."""
    from vllm import SamplingParams

    length, begins = asked["context"] + asked["new"], np.random.default_rng(0)
    prompts = [
        text[begin : begin + length].tolist()
        for begin in begins.integers(0, len(text) - length, asked["texts"])
    ]
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = llm.generate([{"prompt_token_ids": one} for one in prompts], wanted, use_tqdm=False)
    logp = [
        one.prompt_logprobs[i][prompt[i]].logprob
        for one, prompt in zip(found, prompts, strict=True)
        for i in range(asked["context"], length)
    ]
    return math.exp(-sum(logp) / len(logp))


def needles(llm: Any, text: np.ndarray, asked: dict[str, Any]) -> dict[str, int]:
    """Return how many numbers that a text hides the model finds."""
    from vllm import SamplingParams

    tokenizer, pick = llm.get_tokenizer(), np.random.default_rng(1)
    prompts, numbers = [], []
    for i in range(asked["needles"]):
        number = str(pick.integers(10_000, 100_000))
        fact = tokenizer.encode(f"\nThe magic number is {number}. Remember it.\n")
        question = tokenizer.encode("\nQuestion: What is the magic number?\nThe magic number is")
        room = asked["context"] - len(fact) - len(question)
        begin = pick.integers(0, len(text) - room)
        rest = text[begin : begin + room].tolist()
        at = int((room - PAGE) * i / asked["needles"])  # in a packed page, at any depth
        prompts.append({"prompt_token_ids": [*rest[:at], *fact, *rest[at:], *question]})
        numbers.append(number)
    wanted = SamplingParams(max_tokens=10, temperature=0)
    found = llm.generate(prompts, wanted, use_tqdm=False)
    right = [
        number in one.outputs[0].text.replace(",", "")
        for number, one in zip(numbers, found, strict=True)
    ]
    return {"needles_found": sum(right), "needles": len(right)}


if __name__ == "__main__":
    main()
