"""The time of a prompt in a recipe's cache, relative to plain transformers.

SmolLM2-135M-Instruct in bfloat16 reads prose that no recipe was chosen on, with one thread.
Recipes alternate. Times are processor time, which other load on the machine hardly changes; ratios
are medians over rounds, each with another text. The first round compiles kernels and is left out.

    python benchmarks/prompt_time.py
    python benchmarks/prompt_time.py --tokens 512 768 --result prompt_time_short
        # writes prompt_time_short.json; 1024 1536 wrote prompt_time_middle.json
    python benchmarks/prompt_time.py --tokens 6144 --recipes full small --result prompt_time_6144
        # writes prompt_time_6144.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from transformers import DynamicCache

import kvloom
import record
from evidence import prose
from kvloom.errors import CacheMisuse
from kvloom_lab.models import load

STOCK = "DynamicCache"


def processor_seconds(fn: Callable) -> float:
    """Return the processor time of a call in seconds."""
    begin = time.process_time()
    fn()
    return time.process_time() - begin


def main() -> None:
    scores = [f"{name}:tokens=256" for name in ("knorm", "snapkv", "expected", "kvzip", "rotated")]
    recipes = ["full", "near-lossless", "balanced", "small", "tiny", "micro", *scores]
    options = record.options(
        __doc__, tokens=[2048], rounds=5, recipes=recipes, result="prompt_time"
    )
    torch.set_num_threads(1)
    model, tokenizer = load("smollm2", "bfloat16")
    ids = tokenizer(prose(), return_tensors="pt", verbose=False).input_ids

    @torch.inference_mode()
    def read(recipe: str, prompt: torch.Tensor) -> None:
        if recipe == STOCK:
            with suppress(CacheMisuse):  # nothing is attached before the first recipe
                kvloom.detach(model)
            cache = DynamicCache(config=model.config)
        else:
            cache = kvloom.Cache(model, recipe)
        model(prompt, past_key_values=cache, logits_to_keep=1)

    rows = []
    for tokens in options.tokens:
        seconds: dict[str, list[float]] = {x: [] for x in (STOCK, *options.recipes)}
        for i in range(options.rounds + 1):
            prompt = ids[:, (begin := i * ids.shape[1] // (options.rounds + 1)) : begin + tokens]
            for recipe, times in seconds.items():
                times.append(processor_seconds(lambda r=recipe, p=prompt: read(r, p)))
        for recipe, times in seconds.items():
            ratios = [x / stock for x, stock in zip(times[1:], seconds[STOCK][1:], strict=True)]
            rows.append(
                {"tokens": tokens, "recipe": recipe, "seconds": statistics.median(times[1:]),
                 "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
            )  # fmt: skip
            print(
                f"{tokens:>6} {recipe:>14}: {rows[-1]['seconds']:6.2f} s, "
                f"{rows[-1]['ratio']:.2f} times {STOCK} [{min(ratios):.2f}, {max(ratios):.2f}]"
            )
    record.write(options.result, {"environment": record.environment(), "rows": rows})


if __name__ == "__main__":
    main()
