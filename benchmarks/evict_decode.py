"""Decode speed at half the budget: eviction against `full` and transformers' DynamicCache + SDPA.

All caches contain the same prompt of the same model in the same process. Their steps alternate, so
that other load on the machine affects all of them. Times are medians of a step.

    python benchmarks/evict_decode.py
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from transformers import DynamicCache

import kvloom
import kvloom_lab
import record
from kvloom_lab.bench.timing import Candidate, time_candidates

RECIPES = ("full", "h2o", "keyformer", "snapkv:fraction=0.5", "random", "window:tokens=4096")


def main() -> None:
    options = record.options(__doc__, context=8192, steps=40)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        rows += measure(dtype, options.context, options.steps)
    environment = record.environment(context=options.context, steps=options.steps)
    record.write("evict_decode", {"environment": environment, "rows": rows})


def measure(dtype: torch.dtype, context: int, steps: int) -> list[dict]:
    """Return one row per cache, on the reference model."""
    plain, ours = (kvloom_lab.reference_model(dtype) for _ in range(2))
    ids = torch.randint(3, plain.config.vocab_size, (1, context))
    candidates = {"DynamicCache": (plain, DynamicCache(config=plain.config))}
    candidates |= {recipe: (ours, kvloom.Cache(ours, recipe)) for recipe in RECIPES}
    with torch.inference_mode():
        for model, cache in candidates.values():
            model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    calls = [
        Candidate(name, partial(model, input_ids=ids[:, :1], past_key_values=cache))
        for name, (model, cache) in candidates.items()
    ]
    times = time_candidates(calls, steps, warm_up=10)
    median = {name: statistics.median(found.ms) for name, found in times.items()}
    rows = []
    for name, (_, cache) in candidates.items():
        row = {
            "dtype": str(dtype).removeprefix("torch."),
            "cache": name,
            "ms": median[name],
            "speed_over_dynamic": median["DynamicCache"] / median[name],
            "speed_over_full": median["full"] / median[name],
            "nbytes": getattr(cache, "nbytes", None),
        }
        rows.append(row)
        print(
            f"{row['dtype']:>8} {name:<20} {row['ms']:7.2f} ms a step, "
            f"{row['speed_over_dynamic']:5.2f}x DynamicCache, {row['speed_over_full']:5.2f}x full",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main()
