"""Seconds from the start of Python's imports to the tokens of a prompt, by recipe.

Each row is a process of its own, which imports torch, transformers and kvloom, loads SmolLM2, reads
a prompt and generates tokens: first with an empty cache of compiled kernels (cold), then with the
kernels that this left (warm). Rows of plain transformers (`plain`) alternate with them. The second
token is the first whose step reads packed tokens. `processor_s` counts all threads, and processes
that compile. Figures are medians over the repeats.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --recipes small tiny --dtype float32 --repeats 5
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

PLAIN = "plain"
RECIPES = ["full", "kivi", "near-lossless", "balanced", "small", "tiny", "h2o", "clusterkv"]
_ROW = "--row"


class Stamps:
    """Wall and processor seconds since the start of this process's imports; a streamer."""

    def __init__(self) -> None:
        self.wall, self.processor = time.perf_counter(), time.process_time()
        self.tokens: list[dict[str, float]] = []

    def now(self) -> dict[str, float]:
        return {
            "s": time.perf_counter() - self.wall,
            "processor_s": time.process_time() - self.processor,
        }

    def put(self, value: object) -> None:
        self.tokens.append(self.now())

    def end(self) -> None:
        pass


def measure(folder: str, recipe: str, dtype: str, prompt: int, new: int) -> dict[str, Any]:
    """Return the figures of this process; the imports are part of them."""
    stamps = Stamps()
    import torch
    from transformers import AutoModelForCausalLM

    if recipe != PLAIN:
        import kvloom
    imported = stamps.now()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype, "auto"))
    loaded = stamps.now()
    ids = 3 + torch.arange(prompt)[None] * 37 % (model.config.vocab_size - 3)
    cache = {} if recipe == PLAIN else {"past_key_values": kvloom.Cache(model, recipe)}
    model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
        do_sample=False, streamer=stamps, **cache,
    )  # fmt: skip
    figures = {"imported": imported, "loaded": loaded, "tokens": stamps.tokens[1:]}
    if recipe != PLAIN:
        from kvloom.kernels import companion, compile_seconds

        companion.wait()  # its processor time is counted, and the next process is warm
        figures["compile_s"] = compile_seconds()
    return figures


def run(row: list[Any], kernels: str) -> dict[str, Any]:
    """Return what `measure` returns in a new process; kernels: the folder of compiled kernels."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    printed = subprocess.run(
        [sys.executable, __file__, _ROW, json.dumps(row)],
        env={**os.environ, "NUMBA_CACHE_DIR": kernels},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures: dict[str, Any] = json.loads(printed)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**figures, "processor_s": spent}


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of some processes."""
    read = {
        "imported_s": lambda x: x["imported"]["s"],
        "loaded_s": lambda x: x["loaded"]["s"],
        "first_token_s": lambda x: x["tokens"][0]["s"],
        "second_token_s": lambda x: x["tokens"][1]["s"],
        "last_token_s": lambda x: x["tokens"][-1]["s"],
        "first_token_processor_s": lambda x: x["tokens"][0]["processor_s"],
        "second_token_processor_s": lambda x: x["tokens"][1]["processor_s"],
        "last_token_processor_s": lambda x: x["tokens"][-1]["processor_s"],
        "processor_s": lambda x: x["processor_s"],
        "compile_s": lambda x: x.get("compile_s", 0.0),
    }
    return {name: statistics.median(map(fn, runs)) for name, fn in read.items()}


def main() -> None:
    import record
    from kvloom_lab.models import located

    options = record.options(
        __doc__, model="smollm2", dtype="auto", prompt=1500, new_tokens=5, repeats=3,
        recipes=RECIPES, result="first_step",
    )  # fmt: skip
    folder = located(options.model)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(options.repeats):
        for recipe in (PLAIN, *options.recipes):
            row = [folder, recipe, options.dtype, options.prompt, options.new_tokens]
            with tempfile.TemporaryDirectory() as kernels:
                for state in ("cold", "warm"):
                    runs.setdefault((recipe, state), []).append(run(row, kernels))
    medians = {key: summary(x) for key, x in runs.items()}
    rows = []
    for (recipe, state), figures in medians.items():
        plain = medians[PLAIN, "warm"]
        above = {
            f"{name}_above_plain": figures[name] - plain[name]
            for name in (
                "first_token_s", "second_token_s", "second_token_processor_s", "processor_s",
            )
        }  # fmt: skip
        rows.append({"recipe": recipe, "kernels": state, **figures, **above})
        print(
            f"{recipe:>14} {state}: first token {figures['first_token_s']:6.2f} s "
            f"({above['first_token_s_above_plain']:+.2f}), second {figures['second_token_s']:6.2f} "
            f"({above['second_token_s_above_plain']:+.2f}), last {figures['last_token_s']:6.2f}; "
            f"processor {figures['processor_s']:6.2f} s ({above['processor_s_above_plain']:+.2f})"
        )
    settings = {name: getattr(options, name) for name in ("model", "dtype", "prompt", "repeats")}
    record.write(options.result, {"environment": record.environment(**settings), "rows": rows})


if __name__ == "__main__":
    if _ROW in sys.argv:
        print(json.dumps(measure(*json.loads(sys.argv[-1]))))
    else:
        main()
