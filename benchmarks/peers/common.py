"""Shared code of the peers' scripts; needs only numpy."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def options(about: str) -> argparse.Namespace:
    """Return the options of `kvloom bench generate`, with the same defaults."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--context", default="512,8192", help="Tokens, such as 8192,32768.")
    parser.add_argument("--heads", default="32/8", help="Query heads / key-value heads.")
    for name, default in (
        ("head-dim", 64),
        ("layers", 8),
        ("hidden", 2048),
        ("intermediate", 8192),
        ("vocabulary", 32000),
        ("repeats", 15),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", metavar="FILE", help="Write figures as JSON.")
    found = parser.parse_args()
    found.q_heads, found.kv_heads = map(int, found.heads.split("/"))
    found.contexts = [int(n) for n in found.context.split(",")]
    found.shape = (
        f"{found.layers} layers, hidden {found.hidden}, {found.q_heads}q/{found.kv_heads}kv x "
        f"{found.head_dim}"
    )
    return found


def read_gb_s(threads: int, seconds: float = 1.0) -> float:
    """Return the highest rate at which threads sum 512 MiB, each its own part."""
    x = np.ones(1 << 27, np.float32)
    parts, best = np.array_split(x, threads), 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, x.nbytes / (time.perf_counter() - begin) / 1e9)
    return best


def alternate(
    calls: dict[str, Callable[[], Any]], repeats: int, warm_up: int = 3
) -> dict[str, list]:
    """Return the milliseconds of each call, timed alternately."""
    times: dict[str, list] = {name: [] for name in calls}
    for i in range(warm_up + repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if i >= warm_up:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def row(
    given: argparse.Namespace, name: str, context: int, ms: list[float], kv: int, weights: int,
    baselines: dict[str, list[float]], **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return one row of `kvloom bench --json`. baselines: times that ratios are to."""
    median = statistics.median(ms)
    made = {
        "name": name,
        "shape": given.shape,
        "context": context,
        "batch": 1,
        "ms": median,
        "least_ms": min(ms),
        "kv_bytes": kv,
        "read_bytes": weights + kv,
        "gb_s": (weights + kv) / median / 1e6,
        "ratios": {name: statistics.median(other) / median for name, other in baselines.items()},
        "fell": [],
        "problem": None,
        **more,
    }
    ratios = "".join(f", {r:.2f}x {name}" for name, r in made["ratios"].items())
    print(
        f"{context:>7,} {name:<28} {median:8.2f} ms, least {min(ms):8.2f}, KV {kv / 2**20:8.1f} "
        f"MiB, {made['gb_s']:5.1f} GB/s{ratios}",
        flush=True,
    )
    return made


def write(given: argparse.Namespace, rows: list[dict], versions: dict[str, str]) -> None:
    """Write the figures to the file of --json."""
    limit = read_gb_s(given.threads)
    print(f"the machine reads at most {limit:.1f} GB/s")
    if given.json is None:
        return
    facts = {
        "python": platform.python_version(),
        **versions,
        "cpu": _cpu(),
        "threads": given.threads,
        "shape": given.shape,
        "repeats": given.repeats,
    }
    data = {"environment": facts, "limits": {"read_gb_s": limit}, "rows": rows}
    Path(given.json).write_text(json.dumps(data, indent=2) + "\n")
    print(f"written: {given.json}", file=sys.stderr)


def read_job() -> dict[str, Any]:
    """Return what the script that started this one asks for: a row, a model, ids and others."""
    return json.loads((Path(sys.argv[1]) / "job.json").read_text())


def write_figures(**figures: Any) -> None:
    """Give the script that started this one its figures: of `throughput.py`, `RunFigures`."""
    (Path(sys.argv[1]) / "figures.json").write_text(json.dumps(figures))


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
