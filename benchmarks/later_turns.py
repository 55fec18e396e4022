"""Attention of a later turn: many queries over a packed past, against torch over an exact past.

One layer, batch 1, one thread: T queries attend to N tokens of the past and to their own T. torch's
`scaled_dot_product_attention` reads all of it exactly, with the causal mask that it then needs;
kvloom reads the past as a recipe packs it. Calls alternate; times are processor time.

    python benchmarks/later_turns.py
    python benchmarks/later_turns.py --past 8192 --queries 64
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import record
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend.regions import Region
from kvloom.recipe import resolve
from kvloom.store.kv_side import KVSide

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3.1-8B": (32, 8, 128)}
SDPA = "SDPA, exact"
REFERENCE = "near-lossless"  # which the torch reference attends to, too


def region(recipe: str, k: torch.Tensor, v: torch.Tensor, own: int) -> Region:
    """Return keys and values [1, Hk, N, D] as a recipe stores them; the last `own` are exact."""
    chosen = resolve(recipe)
    if chosen.store.exact:
        return Region.exact(k, v, step_tokens=own)
    sides = []
    for x, fmt in ((k, chosen.store.keys), (v, chosen.store.values)):
        assert fmt is not None
        side = KVSide(fmt, own)
        side.extend(x, 0, prompt=True)
        sides.append(side.kv_view())
    return Region(*sides, step_tokens=own)


def attentions(
    heads: tuple[int, int, int], dtype: torch.dtype, past: int, t: int, recipes: list[str]
) -> dict[str, Callable[[], object]]:
    """Return a call for SDPA, for each recipe and for the reference, by name."""
    hq, hk, d = heads
    q = torch.randn(1, hq, t, d).to(dtype)
    k, v = (torch.randn(1, hk, past + t, d).to(dtype) for _ in "kv")
    mask = torch.ones(t, past + t, dtype=torch.bool).tril(past)
    calls: dict[str, Callable[[], object]] = {
        SDPA: partial(F.scaled_dot_product_attention, q, k, v, mask, enable_gqa=True)
    }
    for name in recipes:
        stored = [region(name, k, v, t)]
        assert ops.attend.choose(q, stored, d**-0.5).backend == "cpu"
        calls[name] = partial(ops.attend, q, stored, d**-0.5)
        if name == REFERENCE:
            calls[f"{name}, by the reference"] = partial(by_reference, calls[name])
    return calls


def by_reference(call: Callable[[], object]) -> object:
    """Run a call with the torch reference in place of kernels."""
    with dispatch.use("ref"):
        return call()


def milliseconds(fn: Callable[[], object]) -> float:
    """Return the processor time of a call."""
    begin = time.process_time()
    fn()
    return 1e3 * (time.process_time() - begin)


def main() -> None:
    options = record.options(
        __doc__, past=[2048, 8192], queries=[16, 128, 512], rounds=9,
        recipes=["full", "near-lossless", "kivi"], dtypes=["bfloat16", "float32"],
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    cases = product(SHAPES, options.dtypes, options.past, options.queries)
    for shape, dtype, past, t in cases:
        calls = attentions(SHAPES[shape], getattr(torch, dtype), past, t, options.recipes)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _, (name, call) in product(range(options.rounds + 1), calls.items()):
            times[name].append(milliseconds(call))
        for name, found in times.items():
            ratios = [a / b for a, b in zip(found[1:], times[SDPA][1:], strict=True)]
            row = {
                "shape": shape, "dtype": dtype, "past": past, "queries": t, "what": name,
                "ms": statistics.median(found[1:]), "ratio": statistics.median(ratios),
                "low": min(ratios), "high": max(ratios),
            }  # fmt: skip
            rows.append(row)
            print(
                f"{shape:>13} {dtype:>8} past {past:>5} queries {t:>4} {name:>31} "
                f"{row['ms']:8.2f} ms, {row['ratio']:.2f} times {SDPA} "
                f"[{row['low']:.2f}, {row['high']:.2f}]",
                flush=True,
            )
    record.write("later_turns", {"environment": record.environment(), "rows": rows})


if __name__ == "__main__":
    main()
