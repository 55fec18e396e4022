"""Tokens that fit, and tokens per second, of recipes beside an unmodified vLLM, as JSON.

    python benchmarks/throughput.py --recipes near-lossless,balanced --out result.json

Each engine runs in a process of its own, one after the other, with the same memory, model and
prompts. The time of decoding is that of a run less that of a run of one new token. `none` is vLLM
without kvloom; `fp8` is vLLM's own format. Prompts are arbitrary token ids: the figures are those
of speed and memory, not of quality.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

CLEAR = 0.5
"""A speed needs decoding to take at least this share of the prompt's time; give a larger --new."""


def main() -> None:
    """Measure what the command line asks for, and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, reference, or a folder")
    parser.add_argument("--recipes", default="none,fp8,near-lossless,balanced,kivi")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of a request")
    parser.add_argument("--mib", type=int, default=1024, help="memory of the cache")
    parser.add_argument("--runs", type=int, default=2, help="the fastest counts")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    model = folder(asked.model)
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for recipe in asked.recipes.split(","):
        with spawn.Pool(1) as pool:
            row = pool.apply(measure, (model, recipe, vars(asked)))
        rows.append(row)
        print(json.dumps(row), flush=True)
    found = {
        "model": asked.model, "prompt": asked.prompt, "new": asked.new, "cache_mib": asked.mib,
        "threads": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count())),
        "machine": platform.processor() or platform.machine(), "engines": rows,
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def folder(model: str) -> str:
    """Return the folder of a model."""
    if model == "smollm2":
        from kvloom.workload import smollm2

        return str(smollm2.folder())
    if model == "reference":
        from kvloom.reference import WEIGHTS

        return str(WEIGHTS)
    return model


def measure(model: str, recipe: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens that fit, and for each batch size seconds to the first token and tokens/s."""
    from vllm import LLM, SamplingParams

    own = recipe in ("none", "fp8")
    llm = LLM(
        model, dtype="bfloat16", enforce_eager=True, max_model_len=asked["prompt"] + asked["new"],
        kv_cache_memory_bytes=asked["mib"] << 20, enable_prefix_caching=False, seed=0,
        kv_cache_dtype="fp8" if recipe == "fp8" else "auto",
        additional_config={} if own else {"kvloom": recipe},
    )  # fmt: skip
    cache = llm.llm_engine.vllm_config.cache_config
    vocabulary = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    row: dict[str, Any] = {
        "recipe": recipe, "tokens_that_fit": cache.num_gpu_blocks * cache.block_size, "batches": []
    }  # fmt: skip

    def seconds(batch: int, new: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 + i * 31 + j * 17) % (vocabulary - 8) for j in range(n)]}
            for i, n in enumerate([asked["prompt"]] * batch)
        ]
        wanted = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        begin = time.perf_counter()
        llm.generate(prompts, wanted, use_tqdm=False)
        return time.perf_counter() - begin

    seconds(1, 2)  # compiles kernels
    for batch in map(int, asked["batches"].split(",")):
        first = min(seconds(batch, 1) for _ in range(asked["runs"]))
        whole = min(seconds(batch, asked["new"]) for _ in range(asked["runs"]))
        decoded = batch * (asked["new"] - 1)
        longer = whole - first  # no speed where it is within the noise of the prompt's time
        clear = longer > CLEAR * first
        row["batches"].append(
            {
                "batch": batch,
                "prefill_s": round(first, 4),
                "decode_tokens_per_s": round(decoded / longer, 2) if clear else None,
                "tokens_per_s": round(batch * asked["new"] / whole, 2),
            }
        )
    return row


if __name__ == "__main__":
    main()
