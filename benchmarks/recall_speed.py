"""The cost of recall in one layer: clustering during prefill, and a decode step by context.

These are the sections `prefill` and `decode` of `recall.py`, which writes their figures.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.cache import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.recall.clusters import ClusterFinder
from kvloom.recipe import resolve


def prefill() -> list[dict[str, Any]]:
    """Measure the prefill of a random layer of Llama-2-7B's size, with 8 and 32 key/value heads.

    Returns the seconds of its projections and MLP, of the prompt's attention and of clustering its
    keys, and clustering's share of the total. At 8k in both dtypes, at 32k in the faster one.
    """
    all_rows: list[dict[str, Any]] = []
    for kv_heads in (8, 32):
        dtypes = (torch.float32, torch.bfloat16)
        for context in (8192, 32768):
            rows = [layer_prefill(context, kv_heads, dtype) for dtype in dtypes]
            all_rows += rows
            dtypes = (min(zip(rows, dtypes, strict=True), key=lambda x: x[0]["layer_s"])[1],)
            for row in rows:
                print(row, flush=True)
    return all_rows


def layer_prefill(context: int, kv_heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the seconds of a prompt by part; layer_s excludes clustering."""
    hidden, inner, dim = 4096, 11008, 128
    spent: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - begin
        return result

    g = torch.Generator().manual_seed(0)

    def linear(x: Tensor, width: int) -> Tensor:
        weight = torch.randn(width, x.shape[-1], generator=g).mul_(x.shape[-1] ** -0.5).to(dtype)
        return timed("linear_s", lambda: F.linear(x, weight))

    def heads(x: Tensor, count: int) -> Tensor:
        return linear(x, count * dim).view(1, context, count, dim).transpose(1, 2)

    x = torch.randn(1, context, hidden, generator=g).to(dtype)
    q, k, v = heads(x, hidden // dim), heads(x, kv_heads), heads(x, kv_heads)
    layer = LayerCache(resolve("clusterkv"), "a layer", 2, 3)
    grow = layer._state.retriever.grow
    warm = resolve("clusterkv").recall.index.finder()  # compiles
    warm.extend(k[:, :, :160].contiguous(), torch.ones(1, 1, 160, dtype=torch.bool))
    layer._state.retriever.grow = lambda *args: timed("cluster_s", lambda: grow(*args))
    out = timed("attend_s", lambda: layer.attend(q, k, v, scale=dim**-0.5))
    spent["attend_s"] -= spent["cluster_s"]
    linear(out.transpose(1, 2).reshape(1, context, hidden), hidden)
    gate, up = linear(x, inner), linear(x, inner)
    linear(timed("linear_s", lambda: F.silu(gate) * up), hidden)
    layer_s = spent["linear_s"] + spent["attend_s"]
    return {
        "context": context,
        "kv_heads": kv_heads,
        "dtype": str(dtype).removeprefix("torch."),
        **spent,
        "layer_s": layer_s,
        "share": spent["cluster_s"] / (layer_s + spent["cluster_s"]),
    }


def decode() -> list[dict[str, Any]]:
    """Return the fastest and median step of one 32q/8kv x 128 layer with random keys, budget 1024.

    Steps of all candidates alternate, each with its own queries. `full` is torch's fused attention
    over all tokens as transformers calls it. K-means makes one iteration, because the step's time
    does not depend on the quality of the clusters. Two parts of a step are also timed alone:
    rating centroids or page bounds, which grows with the context, and choosing tokens.
    """
    all_rows: list[dict[str, Any]] = []
    names = ("quest", "clusterkv", "clusterkv-2bit")
    for dtype in (torch.float32, torch.bfloat16):
        for context in (8192, 32768, 131072):
            k, v = torch.randn(2, 1, 8, context, 128).to(dtype).unbind(0)
            calls: dict[str, Callable[[Tensor], Any]] = {}
            for name in names:
                layer = LayerCache(resolve(name), "a layer", 2, 3)
                finder = layer._state.retriever.finder
                if isinstance(finder, ClusterFinder):
                    finder.options = replace(finder.options, iterations=1)
                layer.prefill(StepInputs(Queries(k[:, :, :1].repeat(1, 4, 1, 1), 1.0), k, v))
                layer.forget_undo()
                calls |= parts_of(name, layer, dtype)
            calls["full"] = lambda q, k=k, v=v: F.scaled_dot_product_attention(
                q, k, v, enable_gqa=True
            )
            spent: dict[str, list[float]] = defaultdict(list)
            for repeat in range(32):
                for name, call in calls.items():
                    if name == "full" and repeat >= 8:
                        continue
                    q = torch.randn(1, 32, 1, 128).to(dtype)
                    begin = time.perf_counter()
                    call(q)
                    if repeat >= 2:
                        spent[name].append(1000 * (time.perf_counter() - begin))
            for name, ms in spent.items():
                row = {
                    "dtype": str(dtype).removeprefix("torch."),
                    "context": context,
                    "name": name,
                    "ms": min(ms),
                    "median_ms": statistics.median(ms),
                }
                all_rows.append(row)
                print(f"{row['dtype']:<9} {context:>7} {name:<24} {row['ms']:8.3f} ms, median "
                      f"{row['median_ms']:.3f}", flush=True)  # fmt: skip
            del calls, layer
    return all_rows


def parts_of(name: str, layer: Any, dtype: torch.dtype) -> dict[str, Callable[[Tensor], Any]]:
    """Return a whole step of a layer, and two of its parts."""
    retriever = layer._state.retriever
    finder, count = retriever.finder, retriever.recall.tokens - layer.recipe.always_read
    count -= count % retriever.recall.index.unit
    one = torch.randn(2, 1, 8, 1, 128).to(dtype)
    computed: dict[str, Tensor] = {}

    def rate(q: Tensor) -> None:
        computed["scores"] = finder.scores(q[:, :, 0], retriever.recall.query_heads)

    def choose(q: Tensor) -> None:
        computed["slots"] = finder.choose(computed["scores"], count)

    return {
        name: lambda q: layer.attend(q, one[0], one[1], scale=128**-0.5),
        f"{name}, rating": rate,
        f"{name}, choice": choose,
    }
