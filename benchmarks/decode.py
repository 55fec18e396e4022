"""Decode attention of one layer: kvloom's packed and exact caches beside torch's SDPA.

For each shape, all candidates attend with one query to the same tokens, alternately, so that other
load on the machine affects all of them. `ms` is the median wall time of a call, `cpu_ms` the median
CPU time of all threads. GB/s counts the bytes of keys and values that a call reads once; the
machine's read bandwidth is printed too. Compilation is not timed. "rows" gives SDPA the query heads
of a group as query rows over the same keys, which torch does not do by itself. The calibration that
`skvq` needs (the groups of channels, and their clip factors) is random.

    python benchmarks/decode.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import record
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.kernels import dispatch
from kvloom.positions.rope import Rope
from kvloom.recipe.resolve import resolve
from kvloom.store import LayerMetadata
from kvloom.store.codec import Channels
from kvloom.workload.bandwidth import read_bandwidth_gb_s

D = 128
RECIPES = (
    "full", "kivi", "kivi:rotate=true", "kitty", "kvarn", "kivi:bits=4", "kvarn:bits=4",
    "rtn:bits=4", "turbo", "skvq", "skvq-k2v1.5",
)  # fmt: skip


def cache_of(recipe: str, k, v, hq: int) -> tuple[LayerCache, int]:
    """Return a layer filled with k, v, and the bytes that a step reads."""
    cache = LayerCache(resolve(recipe), metadata=random_calibration(k.shape[1], k.shape[-1]))
    q = torch.zeros(1, hq, 1, k.shape[-1], dtype=k.dtype)
    cache.prefill(StepInputs(Queries(q, 1.0), k, v))
    cache.end_step()
    return cache, cache.nbytes


def random_calibration(hk: int, dim: int, group: int = 128) -> LayerMetadata:
    """Return a random calibration of a layer: groups of channels of all heads."""
    g, count = torch.Generator().manual_seed(0), hk * dim // group

    def side() -> Channels:
        group_of = torch.randperm(hk * dim, generator=g).view(hk, dim) % count
        return Channels(group_of, 0.8 + 0.2 * torch.rand(count, generator=g))

    return LayerMetadata(side(), side(), Rope(10000.0 ** -(torch.arange(0, dim, 2) / dim)))


def candidates(hq: int, hk: int, tokens: int) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what is timed: name -> (call, bytes of keys and values it reads)."""
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 1, hk, tokens, D, generator=g)
    q = torch.randn(1, hq, 1, D, generator=g)
    half = [x.bfloat16() for x in (q, k, v)]
    found: dict[str, tuple[Callable[[], object], int]] = {}
    for name, (a, b, c) in (("fp32", (q, k, v)), ("bf16", half)):
        nbytes = b.nbytes + c.nbytes
        found[f"SDPA {name}"] = (
            lambda a=a, b=b, c=c: F.scaled_dot_product_attention(a, b, c, enable_gqa=True),
            nbytes,
        )
        if hq != hk:
            rows = a.view(1, hk, hq // hk, D)
            found[f"SDPA {name} rows"] = (
                lambda a=rows, b=b, c=c: F.scaled_dot_product_attention(a, b, c),
                nbytes,
            )
    for recipe in RECIPES:
        for name, (a, b, c) in (("fp32", (q, k, v)), ("bf16", half)):
            if name == "fp32" and recipe not in ("full", "kivi"):
                continue
            cache, nbytes = cache_of(recipe, b, c, hq)
            found[f"{recipe} {name}"] = (step(cache, a, b, c), nbytes)
    return found


def step(cache: LayerCache, q, k, v) -> Callable[[], object]:
    """Return a decode step that is rolled back after each call."""
    new_k, new_v = k[:, :, :1], v[:, :, :1]

    def call() -> object:
        out = cache.attend(q, new_k, new_v, scale=D**-0.5)
        cache.roll_back()
        return out

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    limit = read_bandwidth_gb_s()
    print(f"read bandwidth {limit:.1f} GB/s, {torch.get_num_threads()} threads")
    rows = []
    with torch.inference_mode():
        for hq, hk in ((8, 8), (32, 8)):
            timed = candidates(hq, hk, options.tokens)
            wall: dict[str, list[float]] = {name: [] for name in timed}
            cpu: dict[str, list[float]] = {name: [] for name in timed}
            dispatch.ran.clear()
            for i in range(options.repeats + 3):
                for name, (call, _) in timed.items():
                    begin, begin_cpu = time.perf_counter(), time.process_time()
                    call()
                    if i >= 3:
                        wall[name].append(1e3 * (time.perf_counter() - begin))
                        cpu[name].append(1e3 * (time.process_time() - begin_cpu))
            fallbacks = {key for key in dispatch.ran if key[1] != "cpu"}
            assert not fallbacks, f"not run by the kernels: {fallbacks}"
            for name, (_, nbytes) in timed.items():
                ms, cpu_ms = statistics.median(wall[name]), statistics.median(cpu[name])
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
                        for against in ("SDPA fp32", "SDPA bf16")
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
    record.write(
        "decode",
        {
            "environment": record.environment(compile_s=dispatch.compile_seconds()),
            "limits": {"read_gb_s": limit},
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
