"""Perplexity and needles of recipes through vLLM, beside vLLM's own formats, as JSON.

    python benchmarks/quality.py --texts 24 --needles 64 --out quality_smollm2.json

Prompts are computed in chunks of one page, so that all tokens but those of the newest page are read
as the format stores them. Perplexity is that of text after --context tokens; a needle is a number
within --context tokens of text, which the answer must contain. `none` is vLLM without kvloom.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

import one_engine
from one_engine import Engine

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
    model, rows = one_engine.folder(asked.model), []
    options = {
        "block_size": PAGE, "max_model_len": asked.context + asked.new + PAGE,
        "kv_cache_memory_bytes": 256 << 20, "long_prefill_token_threshold": PAGE,
        "max_num_batched_tokens": max(4096, 8 * PAGE), "max_num_seqs": 8,
    }  # fmt: skip
    sizes = asked.context, asked.new, asked.texts, asked.needles
    for recipe in asked.recipes.split(","):
        with Engine(model, recipe, **options) as engine:
            rows.append({"recipe": recipe, **engine.run(measure, *sizes)})
        print(rows[-1], flush=True)
    settings = {name: getattr(asked, name) for name in ("model", "context", "new", "texts")}
    one_engine.write(asked.out, {**settings, "chunk": PAGE, "cache_mib": 256}, engines=rows)


def measure(llm: Any, context: int, new: int, texts: int, count: int) -> dict[str, Any]:
    """Return tokens that fit, perplexity of `new` tokens after `context`, and needles found."""
    # imported late: vLLM does not start beside llvmlite
    from kvloom_lab.workload.text import library_text, tokenize

    text = tokenize(llm.get_tokenizer(), library_text())
    return {
        "tokens_that_fit": one_engine.tokens_that_fit(llm),
        "perplexity": perplexity(llm, text, context, new, texts),
        **needles(llm, text, context, count),
    }


def perplexity(llm: Any, text: np.ndarray, context: int, new: int, texts: int) -> float:
    """Return the perplexity of the last `new` tokens of texts."""
    from vllm import SamplingParams

    length, begins = context + new, np.random.default_rng(0)
    prompts = [
        text[begin : begin + length].tolist()
        for begin in begins.integers(0, len(text) - length, texts)
    ]
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    found = llm.generate([{"prompt_token_ids": one} for one in prompts], wanted, use_tqdm=False)
    logp = [
        one.prompt_logprobs[i][prompt[i]].logprob
        for one, prompt in zip(found, prompts, strict=True)
        for i in range(context, length)
    ]
    return math.exp(-sum(logp) / len(logp))


def needles(llm: Any, text: np.ndarray, context: int, count: int) -> dict[str, int]:
    """Return how many numbers that a text hides the model finds."""
    from vllm import SamplingParams

    tokenizer, pick = llm.get_tokenizer(), np.random.default_rng(1)
    prompts, numbers = [], []
    for i in range(count):
        number = str(pick.integers(10_000, 100_000))
        fact = tokenizer.encode(f"\nThe magic number is {number}. Remember it.\n")
        question = tokenizer.encode("\nQuestion: What is the magic number?\nThe magic number is")
        room = context - len(fact) - len(question)
        begin = pick.integers(0, len(text) - room)
        rest = text[begin : begin + room].tolist()
        at = int((room - PAGE) * i / count)  # in a packed page, at any depth
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
