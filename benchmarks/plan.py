"""Planned beside measured: bytes of the cache, and times of a decode step.

A Llama with random weights (`SHAPE`) decodes on caches that are filled without a prompt. Each
recipe is measured at each context and batch; `kvloom_lab.planner` predicts the same from
measurements of single layers. Times are CPU seconds of one thread, and the least of several calls,
on both sides, so that other load on the machine counts as little as possible. Other load changes
even these within minutes, so the machine is measured again before each group of steps.

The work is done in pieces, which are kept in benchmarks/out/plan.json: the same command continues.

    python benchmarks/plan.py                 # all pieces, some minutes
    python benchmarks/plan.py --seconds 45    # stop after the piece that passes 45 seconds
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import LlamaConfig

import record
from kvloom.kernels import compile_seconds
from kvloom.recipe import resolve
from kvloom_lab.models import random_llama
from kvloom_lab.planner import measure
from kvloom_lab.planner.machine import UNMEASURED
from kvloom_lab.planner.model import ModelFacts, read_model
from kvloom_lab.planner.step import CacheBytes, step_work
from kvloom_lab.workload.layers import ModelShape, filled_cache

OUT = Path(__file__).parent / "out" / "plan.json"
RECIPES = ("full", "kivi-4", "kivi", "h2o", "snapkv", "quest")
CONTEXTS = 2048, 8192, 32768
BATCHES = 1, 4, 8
SHAPE = ModelShape(16, 4, 64, 1, torch.bfloat16, 8, 1024, 4096, 8192)
STEPS = 12
MARK = 0.2


def cpu_seconds(device: object = None) -> float:
    """Return the CPU seconds of this process without the compilation of kernels."""
    return time.process_time() - compile_seconds()


def least(call: Callable[[], object], seconds: float = 0.25) -> float:
    """Return the least CPU seconds of a call, repeated for so many seconds; two calls warm up."""
    call(), call()
    times: list[float] = []
    while len(times) < 5 or sum(times) < seconds:
        begin = cpu_seconds()
        call()
        times.append(cpu_seconds() - begin)
    return min(times)


def facts(model: object) -> ModelFacts:
    """Return what the planner reads of the model's config."""
    config = LlamaConfig(**model.config.to_dict())
    return read_model(config)


def measured(model: object, name: str, context: int, batch: int) -> dict:
    """Return the bytes of a cache and the milliseconds of a decode step on it."""
    shape = replace(SHAPE, batch=batch)
    with torch.no_grad():
        cache = filled_cache(model, resolve(name), shape, context)
        nbytes = cache.nbytes
        ids = torch.ones(batch, 1, dtype=torch.long)
        times = []
        for _ in range(STEPS + 2):
            begin = cpu_seconds()
            model(input_ids=ids, past_key_values=cache, use_cache=True)
            times.append(1e3 * (cpu_seconds() - begin))
    return {"bytes": nbytes, "ms": min(times[2:])}


def piece(model: object, planned: ModelFacts, name: str, context: int) -> list[dict]:
    """Measure the machine, then steps of a recipe at each batch; return both beside each other."""
    cache = CacheBytes(resolve(name), planned)
    works = {batch: step_work(planned, cache, context, batch) for batch in BATCHES}
    machine = measure.complete(UNMEASURED, list(works.values()), planned.geometry)
    rows = []
    for batch, work in works.items():
        real = measured(model, name, context, batch)
        planned_time = machine.step(work)
        ms = 1e3 * planned_time.total.best
        rows.append(
            {
                "recipe": name,
                "context": context,
                "batch": batch,
                "planned_bytes": cache.nbytes(context, batch),
                "measured_bytes": real["bytes"],
                "planned_ms": ms,
                "measured_ms": real["ms"],
                "error": ms / real["ms"] - 1,
                "limit": planned_time.limit,
            }
        )
    return rows


def main() -> None:
    options = record.options(__doc__, seconds=float("inf"))
    torch.set_num_threads(1)
    model = random_llama(SHAPE, max(CONTEXTS))
    planned = facts(model)
    done = json.loads(OUT.read_text()) if OUT.exists() else {}
    begin = time.monotonic()
    wanted = [(name, context) for name in RECIPES for context in CONTEXTS]
    for name, context in wanted:
        key = f"{name} {context}"
        if key in done:
            continue
        if time.monotonic() - begin > options.seconds:
            print(f"{len(done)} of {len(wanted)} pieces; run the same command to continue")
            return
        with patch.object(measure, "_median", least):
            done[key] = piece(model, planned, name, context)
        for row in done[key]:
            print(
                f"{name:>8} {context:>6} x {row['batch']}: planned {row['planned_ms']:7.1f} ms, "
                f"measured {row['measured_ms']:7.1f}, {row['error']:+5.0%}, {row['limit']}",
                flush=True,
            )
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(done))
    finished = [row for name, context in wanted for row in done[f"{name} {context}"]]
    errors = [abs(row["error"]) for row in finished]
    summary = {
        "bytes_equal": all(row["planned_bytes"] == row["measured_bytes"] for row in finished),
        "within_mark": sum(error <= MARK for error in errors),
        "rows": len(finished),
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
    }
    print(summary)
    record.write(
        "plan",
        {
            "environment": record.environment(shape=str(SHAPE), dtype="bfloat16", clock="cpu"),
            "summary": summary,
            "rows": finished,
        },
    )


if __name__ == "__main__":
    main()
