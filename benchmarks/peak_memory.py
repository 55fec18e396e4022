"""Peak memory of the process that reads a long prompt: recipes against `full`.

`kivi` packs each layer as soon as it has run, so the exact cache of all layers never exists: the
peaks should differ by the memory that the cache saves. The heads of `small` compete over all
layers, so all layers wait for the last one. Each recipe runs in its own process; the peak is the
operating system's figure (maximum resident set), minus the memory that was resident before the
prompt. During the prompt, glibc keeps freed blocks of up to 32 MiB by default; this hides a part of
the saving. So each recipe is measured with that default, and with MALLOC_MMAP_THRESHOLD_ set, under
which glibc returns them. `resident` is what the process still has after the prompt. Peaks of equal
runs differ, so each figure is the median of some rounds, with its range.

    python benchmarks/peak_memory.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable

import record

THRESHOLD = "MALLOC_MMAP_THRESHOLD_"


def one(recipe: str, tokens: int) -> dict[str, int]:
    """Read a prompt of `tokens` tokens with a recipe; return bytes of the cache and of the peak."""
    import torch

    import kvloom
    import kvloom_lab

    model = kvloom_lab.reference_model(torch.float32)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens))
    with torch.inference_mode():
        model(input_ids=ids[:, :512], past_key_values=kvloom.Cache(model, recipe))
        before, resident = record.peak_bytes(), record.resident_bytes()
        cache = kvloom.Cache(model, recipe)
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    return {
        "held": cache.nbytes,
        "peak": record.peak_bytes() - before,
        "resident": record.resident_bytes() - resident,
    }


def spread(figures: Iterable[int]) -> dict[str, float]:
    """Return the median of figures and their range."""
    ordered = sorted(figures)
    return {"low": ordered[0], "median": statistics.median(ordered), "high": ordered[-1]}


def mib(figures: dict[str, float]) -> str:
    low, median, high = (f"{figures[x] / 2**20:.1f}" for x in ("low", "median", "high"))
    return f"{median} MiB" if low == high else f"{median} MiB ({low} to {high})"


def main() -> None:
    recipes = ["kivi", "near-lossless", "small"]
    # one: a recipe to measure in this process
    options = record.options(__doc__, tokens=32768, rounds=5, recipes=recipes, one="")
    if options.one:
        print(json.dumps(one(options.one, options.tokens)))
        return
    rows = []
    for allocator, changed in (("default", {}), ("returning", {THRESHOLD: "65536"})):
        found: dict[str, list[dict[str, int]]] = {x: [] for x in ["full", *options.recipes]}
        for _ in range(options.rounds):
            for recipe, rounds in found.items():
                command = [
                    sys.executable, __file__, "--one", recipe, "--tokens", str(options.tokens)
                ]  # fmt: skip
                out = subprocess.check_output(command, text=True, env=os.environ | changed)
                rounds.append(json.loads(out.splitlines()[-1]))
        row = {recipe: {x: spread(r[x] for r in rounds) for x in rounds[0]}
               for recipe, rounds in found.items()}  # fmt: skip
        for recipe, figures in row.items():
            print(
                f"{allocator:>9} {recipe}: cache {mib(figures['held'])}, the prompt's peak is "
                f"{mib(figures['peak'])}, after it the process has {mib(figures['resident'])} more"
            )
        for recipe in options.recipes:
            pairs = list(zip(found["full"], found[recipe], strict=True))
            for name, figure in (("saved", "held"), ("peak_below", "peak")):
                row[recipe][name] = spread(full[figure] - packed[figure] for full, packed in pairs)
            saved, below = mib(row[recipe]["saved"]), mib(row[recipe]["peak_below"])
            print(f"with {recipe}, the cache is {saved} smaller and the peak {below} lower")
        rows.append({"allocator": allocator, **row})
    record.write(
        "peak_memory",
        {
            "environment": record.environment(
                tokens=options.tokens, rounds=options.rounds, dtype="float32"
            ),
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
