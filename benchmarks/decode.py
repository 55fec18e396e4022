"""Decode attention of one layer: kvloom's packed and exact caches beside torch's SDPA.

For each shape, the candidates of `kvloom bench decode` in fp32 and in bf16 attend alternately with
one query, so that other load on the machine affects all of them. `ms` is the median wall time of a
call, `cpu_ms` the median CPU time of all threads. GB/s counts the bytes of keys and values that a
call reads once; the machine's read bandwidth is printed too. Compilation is not timed. `kitty` and
`kvarn` are timed where examples/kvloom-formats is installed.

    python benchmarks/decode.py
"""

from __future__ import annotations

import statistics
import time

import torch

import record
from kvloom.kernels import dispatch
from kvloom.recipe import RECIPES as REGISTERED
from kvloom_lab.bench import LayerShape
from kvloom_lab.bench.candidates import decode_candidates
from kvloom_lab.bench.timing import Candidate
from kvloom_lab.workload.clock import read_bandwidth_gb_s
from kvloom_lab.workload.layers import short_name

D = 128
RECIPES = {
    torch.float32: ["full", "kivi"],
    torch.bfloat16: [
        "full", "kivi", "kivi:rotate=true", "kitty", "kvarn", "kivi:bits=4", "kvarn:bits=4",
        "rtn:bits=4", "turbo", "skvq", "skvq-k2v1.5",
    ],
}  # fmt: skip
BASELINES = "SDPA fp32", "SDPA bf16"
WARM_UP = 3


def named_candidates(q_heads: int, kv_heads: int, tokens: int) -> dict[str, Candidate]:
    """Return what is timed in both dtypes, by name; the name of a recipe gets its dtype."""
    found: dict[str, Candidate] = {}
    for dtype, recipes in RECIPES.items():
        shape = LayerShape(q_heads, kv_heads, D, 1, dtype)
        installed = [recipe for recipe in recipes if recipe.partition(":")[0] in REGISTERED]
        for one in decode_candidates(shape, installed, tokens, ["sdpa"]):
            assert one.call is not None, one.problem
            is_recipe = one.name in recipes
            found.setdefault(f"{one.name} {short_name(dtype)}" if is_recipe else one.name, one)
    return found


def times(
    timed: dict[str, Candidate], repeats: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the milliseconds of wall time and of CPU time of each candidate's calls."""
    wall: dict[str, list[float]] = {name: [] for name in timed}
    cpu: dict[str, list[float]] = {name: [] for name in timed}
    for i in range(WARM_UP + repeats):
        for name, one in timed.items():
            begin, begin_cpu = time.perf_counter(), time.process_time()
            one.call()
            if i >= WARM_UP:
                wall[name].append(1e3 * (time.perf_counter() - begin))
                cpu[name].append(1e3 * (time.process_time() - begin_cpu))
    return wall, cpu


def main() -> None:
    options = record.options(__doc__, tokens=32768, repeats=40)
    limit = read_bandwidth_gb_s()
    print(f"read bandwidth {limit:.1f} GB/s, {torch.get_num_threads()} threads")
    rows = []
    for hq, hk in ((8, 8), (32, 8)):
        timed = named_candidates(hq, hk, options.tokens)
        dispatch.ran.clear()
        with torch.inference_mode():
            wall, cpu = times(timed, options.repeats)
        fallbacks = {key for key in dispatch.ran if key[1] == "ref"}
        assert not fallbacks, f"not run by the kernels: {fallbacks}"
        for name, one in timed.items():
            ms, cpu_ms = statistics.median(wall[name]), statistics.median(cpu[name])
            nbytes = one.read_bytes()
            row = {
                "name": name,
                "shape": f"{hq}q/{hk}kv x {D}",
                "context": options.tokens,
                "ms": ms,
                "least_ms": min(wall[name]),
                "cpu_ms": cpu_ms,
                "kv_bytes": nbytes,
                "gb_s": nbytes / ms / 1e6,
                "ratios": {
                    against: {
                        "ms": statistics.median(wall[against]) / ms,
                        "cpu_ms": statistics.median(cpu[against]) / cpu_ms,
                    }
                    for against in BASELINES
                },
            }
            rows.append(row)
            beside = ", ".join(
                f"{r['ms']:.1f}x ({r['cpu_ms']:.1f}x CPU) {against}"
                for against, r in row["ratios"].items()
            )
            print(
                f"{row['shape']} {name:>16}: {ms:7.2f} ms, least {row['least_ms']:6.2f}, CPU "
                f"{cpu_ms:7.2f}, {row['gb_s']:5.1f} GB/s; {beside}"
            )
    environment = record.environment(compile_s=dispatch.compile_seconds())
    record.write(
        "decode", {"environment": environment, "limits": {"read_gb_s": limit}, "rows": rows}
    )


if __name__ == "__main__":
    main()
