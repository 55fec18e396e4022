"""The time to save and load the cache of a prefix, beside the time to prefill it again.

The reference model reads 4,096 random tokens into a cache, which is saved and loaded. Times are
medians.

    python benchmarks/saving.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import kvloom
import kvloom_lab
import record


def ms(fn: Callable, repeats: int) -> float:
    """Return the median time of a call in milliseconds; the first call is not counted."""
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        fn()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def main() -> None:
    recipes = ["full", "kivi", "skvq:group=32", "h2o"]
    options = record.options(__doc__, tokens=4096, repeats=5, recipes=recipes)
    model = kvloom_lab.reference_model(torch.bfloat16)
    vocabulary = model.config.vocab_size
    ids = torch.randint(vocabulary, (1, options.tokens), generator=torch.Generator().manual_seed(0))

    def prefilled(recipe: str) -> kvloom.Cache:
        cache = kvloom.Cache(model, recipe)
        with torch.no_grad():
            model(ids, past_key_values=cache, logits_to_keep=1)
        return cache

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in options.recipes:
            cache, path = prefilled(recipe), Path(folder) / "prefix.kv"
            row = {
                "recipe": recipe,
                "kv_bytes": cache.nbytes,
                "save_ms": ms(lambda c=cache, p=path: c.save(p), options.repeats),
                "file_bytes": path.stat().st_size,
                "load_ms": ms(lambda p=path: kvloom.Cache.load(model, p), options.repeats),
                "prefill_ms": ms(lambda r=recipe: prefilled(r), options.repeats),
            }
            rows.append(row)
            print(
                f"{recipe:>14}: cache {row['kv_bytes']:>10,}, file {row['file_bytes']:>10,} bytes; "
                f"save {row['save_ms']:5.1f} ms, load {row['load_ms']:5.1f}, "
                f"prefill {row['prefill_ms']:6.1f}"
            )
    record.write("saving", {"environment": record.environment(tokens=options.tokens), "rows": rows})


if __name__ == "__main__":
    main()
