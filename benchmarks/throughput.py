"""Output tokens per second of as many requests as fit into equal memory.

SmolLM2 runs `kvloom bench throughput`. The Llama of `kvloom bench generate` decodes after prompts
of 1,024 tokens that are not computed: random keys and values fill its caches, as many as the
planner fits into memory with 256 new tokens. Figures are tokens per second of processor time.

    python benchmarks/throughput.py
    python benchmarks/throughput.py --models llama --rounds 3
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import torch

import record
from kvloom.recipe import resolve
from kvloom.units import parse_bytes
from kvloom_lab.bench import ModelShape
from kvloom_lab.bench.candidates import generate_candidates
from kvloom_lab.bench.serving import DYNAMIC
from kvloom_lab.bench.throughput import Requests
from kvloom_lab.models import random_llama
from kvloom_lab.planner.model import read_model

PROMPT, NEW, STEPS = 1024, 256, 4


@torch.inference_mode()
def llama(recipes: list[str], memory: str, rounds: int) -> None:
    shape = ModelShape()
    model = random_llama(shape, PROMPT + NEW)
    facts = read_model(model.config)
    requests = Requests(model.config, facts, parse_bytes(memory), PROMPT, NEW, np.zeros(1), [])
    batches = {DYNAMIC: requests.memory // requests.exact_nbytes(PROMPT + NEW)}
    batches |= {x: requests.memory // requests.recipe_nbytes(resolve(x)) for x in recipes}
    steps = {}
    for name, batch in batches.items():
        own, baselines = ([], ("dynamic",)) if name == DYNAMIC else ([name], ())
        (steps[name],) = generate_candidates(
            model, replace(shape, batch=batch), own, PROMPT, baselines, None
        )
        assert steps[name].problem is None, steps[name].problem
        steps[name].call()
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = time.process_time()
            for _ in range(STEPS):
                step.call()
            rates[name].append(STEPS * batches[name] / (time.process_time() - begin))
    rows = []
    for name, own in rates.items():
        median = statistics.median(own)
        times = median / statistics.median(rates[DYNAMIC])
        rows.append({
            "name": name, "batch": batches[name], "kv_bytes": steps[name].kv_bytes(),
            "processor_tokens_s": {"low": min(own), "best": median, "high": max(own)},
            "times_dynamic": times,
        })  # fmt: skip
        print(f"{name:>14}: {batches[name]} requests, {median:.1f} tokens/s, {times:.2f}x")
    conditions = {
        "shape": str(shape), "dtype": "bfloat16", "memory": requests.memory, "rounds": rounds
    }  # fmt: skip
    record.write(
        "throughput_llama", {"environment": record.environment(**conditions), "rows": rows}
    )


def main() -> None:
    options = record.options(
        __doc__, models=["smollm2", "llama"], recipes=["near-lossless", "small", "tiny"],
        memory="304MiB", new=256, rounds=5,
    )  # fmt: skip
    torch.set_num_threads(1)
    if "llama" in options.models:
        llama(options.recipes, options.memory, options.rounds)
    if "smollm2" in options.models:
        command = [
            sys.executable, "-m", "kvloom_lab", "bench", "throughput", "--model", "smollm2",
            "--dtype", "bfloat16", "--threads", "1", "--memory", options.memory,
            "--prompt", str(PROMPT), "--max-new-tokens", str(options.new),
            "--rounds", str(options.rounds),
            "--recipes", ",".join(options.recipes),
            "--json", str(record.results() / "throughput.json"),
        ]  # fmt: skip
        print(" ".join(command[1:]), flush=True)
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
