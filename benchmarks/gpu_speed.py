"""Sections `attend` and `kernels`: bytes that must move beside what a copy moves; ratios to torch.

Shapes: 32 query heads over 8 key/value heads of 128, bf16. `GB/s` counts every byte of the keys and
values held (codes, scales, zeros, exact tail) once; `of copy` is its share of what a copy between
two buffers moves in the same run. `ms` is what the kernels of a step take, replayed as a CUDA
graph, and `from Python ms` a call with its launches.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_clock import Bench
from kvloom.kernels import Region, ops
from kvloom.kernels.attend.regions import Spans
from kvloom.kernels.quantize import triton as quant_gpu
from kvloom.kernels.score import triton as score_gpu
from kvloom.kernels.select import reference as select_ref
from kvloom.recipe import Recipe, resolve
from kvloom.store import KVSide

HQ, HK, D = 32, 8, 128
GRID = (  # tokens, batch
    (8_192, 1), (8_192, 16), (8_192, 64), (32_768, 1), (32_768, 8), (32_768, 32),
    (131_072, 1), (131_072, 8), (262_144, 1), (262_144, 4),
)  # fmt: skip
RECIPES = ("full", "kivi", "kivi:bits=4", "rtn:bits=4", "near-lossless", "small", "tiny")
MARKS = {  # issue 7: (recipe, tokens, batch) -> what was aimed at
    ("kivi", 32_768, 8): "mark: 0.6 of copy",
    ("kivi", 131_072, 1): "mark: 4x SDPA",
    ("kivi:bits=4", 131_072, 1): "mark: 3x SDPA",
}


def bandwidth(bench: Bench) -> None:
    """What a copy of 1 GiB moves, read and written."""
    size = 1 << 12 if bench.dry else 1 << 30
    a = torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)
    b = torch.empty_like(a)
    bench.copy_gb_s = 2 * size / bench.ms(lambda: b.copy_(a)) / 1e6
    bench.row("copy", {"GB/s": bench.copy_gb_s})


def attend(bench: Bench) -> None:
    """One decode step of one layer, by context and batch."""
    for tokens, batch in ((160, 1),) if bench.dry else GRID:
        name = f"{tokens} tokens x {batch}"
        if bench.skip(name, 4.0):
            continue
        with bench.guarded(name), torch.inference_mode():
            _steps(bench, tokens, batch)


def _steps(bench: Bench, tokens: int, batch: int) -> None:
    hq, hk, d = (4, 2, 32) if bench.dry else (HQ, HK, D)
    dtype = torch.float16 if bench.dry else torch.bfloat16
    k, v = (torch.randn(batch, hk, tokens, d, device=bench.device, dtype=dtype) for _ in "kv")
    q = torch.randn(batch, hq, 1, d, device=bench.device, dtype=dtype)
    rows = q.view(batch, hk, hq // hk, d)
    nbytes = k.nbytes + v.nbytes
    times = {}
    for name, call in (
        ("SDPA", lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
        ("SDPA, group as rows", lambda: F.scaled_dot_product_attention(rows, k, v)),
    ):
        ms, times[name] = bench.ms(call), bench.kernels_ms(call)
        figures = {"ms": times[name], "from Python ms": ms, **_rate(bench, nbytes, times[name])}
        bench.row(f"{tokens} x {batch}: {name}", figures)
    plain, best = times["SDPA"], min(times.values())
    for recipe in RECIPES:
        regions, nbytes = _stored(resolve(recipe), k, v)
        if ops.attend.choose(q, regions).kernel is None:
            bench.row(f"{tokens} x {batch}: {recipe}", {}, note="left to the reference; not timed")
            continue
        call = partial(ops.attend, q, regions, d**-0.5)
        python, ms = bench.ms(call), bench.kernels_ms(call)
        bench.row(
            f"{tokens} x {batch}: {recipe}",
            {
                "ms": ms,
                "from Python ms": python,
                **_rate(bench, nbytes, ms),
                "x SDPA": plain / ms,
                "x best SDPA": best / ms,
            },
            MARKS.get((recipe, tokens, batch), ""),
        )


def _stored(recipe: Recipe, k: Tensor, v: Tensor) -> tuple[list[Region], int]:
    """The regions that a step reads after a prompt k, v, and their bytes.

    A recipe that evicts keeps the first tokens. Heads share those for which they compete at random,
    some of them several times as many as others.
    """
    store, recents = recipe.store, recipe.protect.exact_recents
    batch, heads, tokens, d = k.shape
    contested, lanes, regions = 0, [], []
    if recipe.keep is not None:
        budget = recipe.keep.budget
        assert budget.fraction is not None
        assert budget.head_share is not None
        tokens = int(budget.fraction * tokens)
        contested = int((1 - budget.head_share) * tokens)
    for x, fmt, recent in zip((k, v), (store.keys, store.values), recents, strict=True):
        lane = KVSide(fmt, recent)
        lane.extend(x[:, :, : tokens - contested], 0, prompt=True)
        lanes.append(lane)
    regions.append(Region(*(lane.kv_view() for lane in lanes)))
    if contested:
        bids = -torch.rand(batch, heads, device=k.device).log()
        parts = bids / bids.sum(dim=-1, keepdim=True) * (contested * heads / store.block_tokens)
        counts = parts.long() * store.block_tokens
        for x, fmt in ((k, store.keys), (v, store.values)):
            lane = KVSide(fmt)
            flat = x[:, :, :contested].reshape(1, 1, -1, d)
            lane.add(flat[:, :, : int(counts.sum())])
            lanes.append(lane)
        regions.append(Region(*(lane.kv_view() for lane in lanes[2:]), Spans.of(counts)))
    return regions, sum(lane.nbytes for lane in lanes)


def _rate(bench: Bench, nbytes: int, ms: float) -> dict[str, float]:
    rate = nbytes / ms / 1e6
    return {"MB": nbytes / 1e6, "GB/s": rate, "of copy": rate / (bench.copy_gb_s or float("nan"))}


def kernels(bench: Bench) -> None:
    """The other kernels: packing, mass, clusters, pages."""
    n = 256 if bench.dry else 32_768
    hq, hk, d = (4, 2, 32) if bench.dry else (HQ, HK, D)
    dtype = torch.float16 if bench.dry else torch.bfloat16
    x = torch.randn(1, hk, n, d, device=bench.device, dtype=dtype)
    q = torch.randn(1, hq, 1, d, device=bench.device, dtype=dtype)
    for work in (_packing, _mass, _clusters, _pages):
        if not bench.skip(work.__name__, 3.0):
            with bench.guarded(work.__name__), torch.inference_mode():
                work(bench, x, q)


def _packing(bench: Bench, x: Tensor, q: Tensor) -> None:
    """All of x behind nothing, for what it reads and writes."""
    for name in ("kivi", "kivi:bits=4"):
        store = resolve(name).store
        for side, fmt in (("keys", store.keys), ("values", store.values)):
            assert fmt is not None
            lane = KVSide(fmt, 0)
            lane.extend(x, 0, prompt=True)
            assert lane.packed is not None
            view = lane.packed.view()
            held = quant_gpu.PackedTensors(view.codes, view.scale, view.zero)
            spec, n = view.layer_encoding, view.hi
            nbytes = x.nbytes + lane.nbytes

            def pack(spec=spec, held=held, n=n):
                quant_gpu.pack(x[:, :, :n], spec, held, 0)

            def unpack(spec=spec, held=held, n=n):
                return quant_gpu.unpack(held, spec, 0, n, x.dtype)

            for what, call in (("pack", pack), ("unpack", unpack)):
                ms = bench.ms(call)
                bench.row(f"{what} {name} {side}", {"ms": ms, **_rate(bench, nbytes, ms)})


def _mass(bench: Bench, x: Tensor, q: Tensor) -> None:
    """Of a prompt, beside the prompt's own attention; of a step, beside reading its keys."""
    hq, n = q.shape[1], min(x.shape[2], 8192)
    k = x[:, :, :n]
    prompt = torch.randn(1, hq, n, x.shape[3], device=x.device, dtype=x.dtype)
    flash = bench.ms(
        lambda: F.scaled_dot_product_attention(prompt, k, k, is_causal=True, enable_gqa=True)
    )
    ms = bench.ms(lambda: score_gpu.column_mass(prompt, k, 0.1))
    work = 2 * hq * n * n * x.shape[3]  # two products of half the matrix each
    figures = {"ms": ms, "TFLOP/s": work / ms / 1e9, "x the prompt's attention": ms / flash}
    bench.row(f"column_mass, prompt of {n}", figures)
    ms = bench.ms(lambda: score_gpu.column_mass(q, x, 0.1))
    bench.row(f"column_mass, step over {x.shape[2]}", {"ms": ms, **_rate(bench, x.nbytes, ms)})


def _clusters(bench: Bench, x: Tensor, q: Tensor) -> None:
    """20 iterations over a prompt's keys; a step's choice of 1024 tokens."""
    n = x.shape[2]
    c = n // 80
    real = torch.ones(1, 1, n, dtype=torch.bool, device=x.device)
    alive = real[:, :, :c]
    start = torch.arange(c, device=x.device).view(1, 1, c) * 80
    given = (x, start, real, alive, "cosine", 2 if bench.dry else 20)
    ms = bench.ms(lambda: select_ref.kmeans(*given), repeats=5)
    bench.row(f"kmeans, {c} clusters", {"ms a layer": ms})
    centroids, labels = select_ref.kmeans(*given)
    size, order = select_ref.sizes(labels, c), labels.argsort(dim=-1, stable=True)
    held = [y.int() for y in (size, size.cumsum(-1) - size, order)]
    means, living = centroids.to(x.dtype), alive.expand(1, x.shape[1], c)

    def choose():
        scores = select_ref.cluster_scores(q[:, :, 0], means, living, "mean")
        return select_ref.select_clusters(scores, *held, min(1024, n // 2))

    bench.row("choose 1024 tokens by clusters", {"ms": bench.ms(choose)})


def _pages(bench: Bench, x: Tensor, q: Tensor) -> None:
    real = torch.ones(1, 1, x.shape[2], dtype=torch.bool, device=x.device)
    ms = bench.ms(lambda: select_ref.page_bounds(x, 16, real))
    bench.row("page bounds", {"ms": ms, **_rate(bench, x.nbytes * 9 // 8, ms)})
    bounds = select_ref.page_bounds(x, 16, real)
    ms = bench.ms(lambda: select_ref.page_scores(q[:, :, 0], *bounds, "each"))
    nbytes = sum(b.nbytes for b in bounds)
    bench.row("page scores", {"ms": ms, **_rate(bench, nbytes, ms)})
