"""Decode speed of the `full` recipe against transformers' own DynamicCache with SDPA.

Both caches hold the same 4096 tokens of the same model in the same process; their steps
alternate, so that whatever else the machine does meets both. Median seconds a step.

    python benchmarks/full_decode.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import DynamicCache

import kvloom
import record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        plain, ours = (kvloom.reference_model(dtype) for _ in range(2))
        ids = torch.randint(3, plain.config.vocab_size, (1, options.context))
        sides = {
            "DynamicCache": (plain, DynamicCache(config=plain.config)),
            "kvloom full": (ours, kvloom.Cache(ours, "full")),
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        with torch.inference_mode():
            for model, cache in sides.values():
                model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            for i in range(options.steps + 20):
                for name, (model, cache) in sides.items():
                    begin = time.perf_counter()
                    model(input_ids=ids[:, i : i + 1], past_key_values=cache)
                    if i >= 20:
                        seconds[name].append(time.perf_counter() - begin)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        ratio = median["DynamicCache"] / median["kvloom full"]
        rows.append(
            {
                "dtype": str(dtype).removeprefix("torch."),
                "context": options.context,
                "ms": {name: 1e3 * value for name, value in median.items()},
                "speed_ratio": ratio,
            }
        )
        times = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in median.items())
        print(f"{rows[-1]['dtype']:>9}: {times}; kvloom is {ratio:.2f}x as fast")
    record.write("full_decode", {"environment": record.environment(), "rows": rows})


if __name__ == "__main__":
    main()
