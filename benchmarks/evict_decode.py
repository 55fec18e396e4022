"""Decode speed at half the budget: eviction against `full` and transformers' DynamicCache + SDPA.

All caches hold the same prompt of the same model in the same process; their steps alternate, so
that whatever else the machine does meets all of them. Median seconds a step.

    python benchmarks/evict_decode.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import DynamicCache

import kvloom
import record

RECIPES = ("full", "h2o", "keyformer", "snapkv:fraction=0.5", "random", "window:tokens=4096")
WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measured(dtype, options.context, options.steps)
    record.write(
        "evict_decode",
        {"environment": record.environment(context=options.context, steps=options.steps),
         "rows": rows},
    )  # fmt: skip


def measured(dtype: torch.dtype, context: int, steps: int) -> list[dict]:
    """One row a cache, on the reference model."""
    plain, ours = (kvloom.reference_model(dtype) for _ in range(2))
    ids = torch.randint(3, plain.config.vocab_size, (1, context))
    sides = {"DynamicCache": (plain, DynamicCache(config=plain.config))}
    sides |= {recipe: (ours, kvloom.Cache(ours, recipe)) for recipe in RECIPES}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with torch.inference_mode():
        for model, cache in sides.values():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        for i in range(steps + WARM_UP):
            for side, (model, cache) in sides.items():
                begin = time.perf_counter()
                model(input_ids=ids[:, i : i + 1], past_key_values=cache)
                if i >= WARM_UP:
                    seconds[side].append(time.perf_counter() - begin)
    median = {side: statistics.median(values) for side, values in seconds.items()}
    rows = []
    for side, (_, cache) in sides.items():
        row = {
            "dtype": str(dtype).removeprefix("torch."),
            "cache": side,
            "ms": 1e3 * median[side],
            "speed_over_dynamic": median["DynamicCache"] / median[side],
            "speed_over_full": median["full"] / median[side],
            "nbytes": getattr(cache, "nbytes", None),
        }
        rows.append(row)
        print(
            f"{row['dtype']:>8} {side:<20} {row['ms']:7.2f} ms a step, "
            f"{row['speed_over_dynamic']:5.2f}x DynamicCache, {row['speed_over_full']:5.2f}x full",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
