"""Section `check`: every kernel against the reference, on fresh data, over poisoned memory.

The reference runs on the CPU, in fp32 or, for codes, to the last bit: a GPU's torch divides by
multiplying with a rounded reciprocal. A case that the dispatch leaves to the reference fails.
"""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvloom
from gpu_clock import Bench
from kvloom.encoding import META
from kvloom.hf import cuda_graphs, recorded_steps
from kvloom.kernels import PackedTensors, Region, operations_run, ops, use_backend
from kvloom.kernels.attend import reference as attend_ref
from kvloom.kernels.attend.regions import KVView, Paged, PageTable, Spans
from kvloom.kernels.quantize import reference as quant_ref
from kvloom.kernels.quantize import triton as quant_gpu
from kvloom.kernels.score import reference as score_ref
from kvloom.kernels.score import triton as score_gpu
from kvloom.kernels.score.noise import Noise
from kvloom.recipe import resolve
from kvloom.store import Encoding, KVSide, LayerEncoding, Packed
from kvloom.store.packed import PackedTokens
from kvloom_lab.models import random_llama
from kvloom_lab.workload.layers import ModelShape

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CLOSE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}  # weights are rounded
Case = tuple[str, str, float, Callable[[], float]]  # operation, what, tolerance, error


def check(bench: Bench, fast: bool = False) -> None:
    """Run all cases; a row an operation, and one for each case that fails.

    Most of the time goes into compiling kernels, so processes share the cases.
    """
    parts = 1 if bench.dry else max(1, min(12, (os.cpu_count() or 1) * 3 // 4))
    if parts == 1:
        found = _part(bench, fast, 0, 1)
    else:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(parts, spawn) as pool:
            started = [pool.submit(_in_process, bench.left, fast, i, parts) for i in range(parts)]
            found = [result for part in started for result in part.result()]
    worst_by_operation: dict[str, list[float]] = defaultdict(list)
    failed = 0
    for operation, what, most, worst, note in found:
        if worst is None:
            bench.skipped.append(f"check: {operation} {what}")
            continue
        worst_by_operation[operation].append(worst)
        if not worst <= most:  # NaN never passes
            failed += 1
            error = None if math.isnan(worst) else worst
            figures = {"ok": False, "error": error, "tolerance": most}
            bench.row(f"{operation} {what}", figures, note=note)
    for operation, errors in worst_by_operation.items():
        worst = max((x for x in errors if not math.isnan(x)), default=None)
        bench.row(operation, {"cases": len(errors), "largest error": worst})
    bench.row("check", {"ok": not failed, "failed": failed})


Result = tuple[str, str, float, float | None, str]
"""Operation, case, tolerance, error (None: no time was left), and the message of a failure."""


def _in_process(seconds: float, fast: bool, part: int, parts: int) -> list[Result]:
    bench = Bench(dry=False)
    bench.begin("check", seconds)
    torch.manual_seed(part)
    return _part(bench, fast, part, parts)


def _part(bench: Bench, fast: bool, part: int, parts: int) -> list[Result]:
    """Run every case whose number is `part` modulo `parts`."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN
    results: list[Result] = []
    try:
        for operation, what, most, error in itertools.islice(cases(bench, fast), part, None, parts):
            worst, note = None, ""
            if bench.dry or bench.left > 0:
                try:
                    worst = error()
                except Exception as problem:
                    if bench.dry:
                        raise
                    worst, note = float("nan"), f"{type(problem).__name__}: {problem}"[:200]
            results.append((operation, what, most, worst, note))
    finally:
        torch.use_deterministic_algorithms(False)
    return results


def cases(bench: Bench, fast: bool) -> Iterator[Case]:
    """All cases, the fewest of each operation if `fast`."""
    for family in (_quant, _rotated, _score, _attend, _prompt, _attend_spans, _pages, _models):
        yield from family(bench, fast)


def _away(got: Tensor, want: Tensor) -> float:
    """The largest difference beside the largest number; NaN and infinities must agree."""
    got, want = got.double().cpu(), want.double().cpu()
    if got.shape != want.shape:
        return float("nan")
    if not torch.equal(got.isfinite(), want.isfinite()) or got.isnan().any():
        return float("nan")
    got, want = got[want.isfinite()], want[want.isfinite()]
    if not want.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def _quant(bench: Bench, fast: bool) -> Iterator[Case]:
    turn = 0
    for bits in quant_ref.PACK_BLOCK:
        for axis in ("channel", "token"):
            meta, dtype = list(META)[turn % 4], DTYPES[turn % 3]
            d, group = ((128, 32), (64, 16), (80, 16), (128, 128))[turn % 4]
            turn += 1
            if fast and turn % 5:
                continue
            encoding = Encoding(bits, axis, 0 if axis == "token" and group == d else group, meta)
            spec = encoding.bind(2, d)
            what = f"{bits} bit per {axis} {group}, D={d}, {meta}, {dtype}"
            yield "pack, unpack", what, 0.0, lambda s=spec, t=dtype: _packed(bench, s, t)


def _rotated(bench: Bench, fast: bool) -> Iterator[Case]:
    for turn, bits in enumerate(quant_ref.PACK_BLOCK):
        dtype = DTYPES[turn % 3]
        d, group = ((128, 0), (64, 32), (256, 0))[turn % 3]
        if fast and bits != 4:
            continue
        encoding = Encoding(bits, "token", group, list(META)[turn % 4], rotation="group")
        spec = encoding.bind(2, d)
        what = f"{bits} bit, groups of {group or d} rotated, D={d}, {encoding.meta}, {dtype}"
        yield "pack, unpack", what, 0.0, lambda s=spec, t=dtype: _packed(bench, s, t)
    spec = Encoding(4, "channel", 32, rotation="head").bind(2, 128)
    yield "pack, unpack", "4 bit, heads rotated", 0.0, lambda: _packed(bench, spec, torch.float16)


def _packed(bench: Bench, spec: LayerEncoding, dtype: torch.dtype) -> float:
    encoding, group, d = spec.encoding, spec.group, spec.head_dim
    channel = encoding.axis == "channel"
    b, h, n = 2, 2, 3 * group if channel else 29
    x = torch.randn(b, h, n, d).to(dtype)
    real = torch.arange(n) >= torch.tensor([0, group + 3])[:, None, None] if channel else None
    codes, scale, zero = quant_ref.to_codes(x.float(), spec, real)
    packed = quant_ref.pack_codes(codes, encoding.bits)
    held = PackedTensors(*(torch.full_like(m.to(bench.device), 77) for m in (packed, scale, zero)))
    cut = n // 2 // group * group if channel else n // 2
    for lo, hi in ((0, cut), (cut, n)):
        here = None if real is None else real[:, :, lo:hi].to(bench.device)
        quant_gpu.pack(x[:, :, lo:hi].to(bench.device), spec, held, lo, here)
    wrong = sum(
        int((a.cpu().float() != b.float()).sum())
        for a, b in zip(held, (packed, scale, zero), strict=True)
    )
    if bench.dry and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter truncates to bf16
    back = quant_ref.from_codes(codes, scale, zero, spec).to(dtype)[:, :, 3:]
    got = quant_gpu.unpack(held, spec, 3, n, dtype)
    if spec.meta != torch.float32:
        return wrong + float((got.cpu() != back).sum())
    return wrong + float((got.cpu().float() - back.float()).abs().max() > 3e-2)


def _score(bench: Bench, fast: bool) -> Iterator[Case]:
    for turn, (t, n, d) in enumerate(
        ((1, 777, 128), (8, 130, 80), (300, 300, 128), (70, 333, 64), (150, 150, 256))
    ):
        if fast and turn % 3:
            continue
        if bench.dry:
            t, n = min(t, 40), min(n, 70)
        for r in (4,) if fast else (1, 4):
            dtype = torch.float16 if bench.dry else DTYPES[(turn + r) % 3]
            what = f"T={t} N={n} D={d} R={r} {dtype}"
            yield (
                "column_mass", what, 1e-4,
                lambda t=t, n=n, d=d, r=r, dt=dtype: _mass(bench, t, n, d, r, dt, False),
            )  # fmt: skip
            yield (
                "column_mass", f"{what}, padding, softcap, bias, noise", 1e-4,
                lambda t=t, n=n, d=d, r=r, dt=dtype: _mass(bench, t, n, d, r, dt, True),
            )  # fmt: skip
    t = 30 if bench.dry else 500
    yield (
        "column_mass", f"largest weights, T={t} N={2 * t}", 1e-4,  # as `small` scores a chunk
        lambda: _mass(bench, t, 2 * t, 128, 4, torch.float16, False, reduce_max=True),
    )  # fmt: skip


def _mass(
    bench: Bench,
    t: int,
    n: int,
    d: int,
    r: int,
    dtype: torch.dtype,
    all_: bool,
    reduce_max: bool = False,
) -> float:
    q, k = torch.randn(2, 2 * r, t, d).to(dtype), torch.randn(2, 2, n, d).to(dtype)
    options: dict[str, Any] = {"reduce_max": reduce_max}
    if all_:
        visible = torch.arange(n) >= torch.tensor([0, n // 3])[:, None, None]
        options |= {
            "visible": visible, "visible_queries": visible[..., -t:],
            "bias": torch.randn(1, 2 * r, n),
            "softcap": 20.0, "tau": 1.5,
        }  # fmt: skip
    index = torch.arange(n).expand(1, 1, n)
    noise = Noise("gumbel", 7, index, n - t) if all_ else None
    want = score_ref.column_mass(q.float(), k.float(), d**-0.5, noise=noise, **options)
    there = {k: _to(v, bench) for k, v in options.items()}
    if noise is not None:
        noise = noise._replace(keys=index.to(bench.device))
    given = q.to(bench.device), k.to(bench.device)
    got = score_gpu.column_mass(*given, d**-0.5, noise=noise, **there)
    return _away(got, want)


def _to(x: Any, bench: Bench) -> Any:
    return x.to(bench.device) if isinstance(x, Tensor) else x


def _attend(bench: Bench, fast: bool) -> Iterator[Case]:
    formats: list[tuple[str, Packed | None, Packed | None]] = [("exact", None, None)]
    for bits in quant_ref.PACK_BLOCK:
        keys = Packed(bits, "channel", 32, "fp16", residual=32)
        formats.append((f"{bits} bit, kivi", keys, Packed(bits, "token", 32)))
    formats += [
        ("4 bit per token, bf16", Packed(4, "token", 32, "bf16"), Packed(4, "token", 0, "bf16")),
        ("8 bit keys, exact values", Packed(8, "token", 16, "fp32"), None),
    ]
    for turn, (name, keys, values) in enumerate(formats):
        if fast and turn not in (0, 3):
            continue
        d, r = ((128, 4), (64, 1), (96, 8), (256, 4))[turn % 4] if turn else (128, 4)
        dtype = torch.float16 if bench.dry else DTYPES[turn % 3]
        for t in (1,) if fast else (1, 4):
            what = f"{name}, D={d} R={r} T={t} {dtype}"
            yield (
                "attend", what, _CLOSE[dtype],
                lambda k=keys, v=values, d=d, r=r, t=t, dt=dtype: _step(bench, k, v, d, r, t, dt),
            )  # fmt: skip


def _step(
    bench: Bench,
    keys: Packed | None,
    values: Packed | None,
    d: int,
    r: int,
    t: int,
    dtype: torch.dtype,
) -> float:
    """A step over a packed prefix and an exact tail, as a layer takes it."""
    n = 150 if bench.dry else 1100
    lanes = []
    for fmt in (keys, values):
        lane = KVSide(fmt, 17)
        lane.extend(torch.randn(2, 2, n, d, device=bench.device).to(dtype), 0, prompt=True)
        lanes.append(lane)
    q = torch.randn(2, 2 * r, t, d, device=bench.device).to(dtype)
    visible = torch.arange(n, device=bench.device) >= torch.tensor(
        [[[0]], [[n // 3]]], device=bench.device
    )
    exact = [lane.kv_view().tensor().cpu().float() for lane in lanes]
    step_tokens = t if t > 1 else 0
    regions = [
        Region(*(lane.kv_view() for lane in lanes), visible=visible, step_tokens=step_tokens)
    ]
    state = _by_kernel(q, regions)
    want = attend_ref.attend_exact(
        q.cpu().float(), *exact, d**-0.5, causal=t > 1, visible=visible.cpu()
    )  # fmt: skip
    return max(_away(state.out, want.out), _away(state.lse, want.lse))


def _prompt(bench: Bench, fast: bool) -> Iterator[Case]:
    for turn, (d, r, t) in enumerate(((128, 4, 700), (64, 1, 70), (96, 8, 257), (256, 4, 130))):
        if fast and turn > 0:
            continue
        for dtype in (torch.float16,) if bench.dry else DTYPES:
            for causal in (True, False):
                what = f"D={d} R={r} T={t} {dtype}{' causal' * causal}"
                yield (
                    "attend_prompt", what, _CLOSE[dtype],
                    lambda d=d, r=r, t=t, dt=dtype, c=causal: _prompt_error(bench, d, r, t, dt, c),
                )  # fmt: skip


def _prompt_error(bench: Bench, d: int, r: int, t: int, dtype: torch.dtype, causal: bool) -> float:
    """Attention of many queries to exact tokens, some of them padding."""
    t, n = (40, 60) if bench.dry else (t, t + 900)
    q, k, v = (
        torch.randn(2, tokens, heads, d, device=bench.device).to(dtype).transpose(1, 2)
        for tokens, heads in ((t, 2 * r), (n, 2), (n, 2))
    )
    visible = torch.arange(n) >= torch.tensor([[[0]], [[n // 5]]])
    options: dict[str, Any] = {"causal": causal, "visible": visible.to(bench.device)}
    bound = ops.attend_prompt.choose(q, k, v, d**-0.5, **options)
    if bound.why:
        raise RuntimeError(f"left to the reference: {bound.why}")
    state = bound.run(q, k, v, d**-0.5, **options)
    on_cpu = (x.cpu().float() for x in (q, k, v))
    want = attend_ref.attend_exact(*on_cpu, d**-0.5, causal=causal, visible=visible)
    return max(_away(state.out, want.out), _away(state.lse, want.lse))


def _by_kernel(q: Tensor, regions: list[Region]) -> attend_ref.AttentionState:
    why = ops.attend.choose(q, regions).why
    if why:
        raise RuntimeError(f"left to the reference: {why}")
    return ops.attend(q, regions, q.shape[3] ** -0.5)


def _attend_spans(bench: Bench, fast: bool) -> Iterator[Case]:
    stores = {name: resolve(name).store for name in ("small", "full", "kivi")}
    turn = 0
    for name, store in stores.items():
        for d, r, t in ((128, 4, 1), (64, 8, 4)):
            dtype = torch.float16 if bench.dry else DTYPES[turn % 3]
            turn += 1
            if fast and turn > 1:
                continue
            yield (
                "attend", f"spans, {name}, D={d} R={r} T={t} {dtype}", _CLOSE[dtype],
                lambda s=store, d=d, r=r, t=t, dt=dtype: _spans(
                    bench, s.keys, s.values, s.block_tokens, d, r, t, dt
                ),
            )  # fmt: skip


def _spans(
    bench: Bench,
    keys: Packed | None,
    values: Packed | None,
    unit: int,
    d: int,
    r: int,
    t: int,
    dtype: torch.dtype,
) -> float:
    """A step over heads with different numbers of tokens, one of them far longer than others."""
    counts = unit * torch.tensor([[3, 0, 1, 4], [1, 2, 5 if bench.dry else 2000 // unit, 1]])
    where = Spans.of(counts)
    lanes = []
    for fmt in (keys, values):
        lane = KVSide(fmt)
        lane.add(torch.randn(1, 1, int(counts.sum()), d, device=bench.device).to(dtype))
        lanes.append(lane)
    q = torch.randn(2, 4 * r, t, d, device=bench.device).to(dtype)
    on_device = where._replace(bounds=where.bounds.to(bench.device))
    state = _by_kernel(q, [Region(*(lane.kv_view() for lane in lanes), on_device)])
    exact = [KVView(None, lane.kv_view().tensor().cpu().float()) for lane in lanes]
    cpu = [Region(*exact, where)]
    want = attend_ref.attend_regions(q.cpu().float(), cpu, d**-0.5)
    return max(_away(state.out, want.out), _away(state.lse, want.lse))


def _pages(bench: Bench, fast: bool) -> Iterator[Case]:
    for turn, name in enumerate(("kivi", "near-lossless", "rtn:bits=8")):
        if fast and turn:
            continue
        dtype, store = torch.float16 if bench.dry else DTYPES[turn], resolve(name).store
        yield (
            "attend", f"pages, {name} {dtype}", _CLOSE[dtype],
            lambda s=store, dt=dtype: _paged(bench, s.keys, s.values, dt),
        )  # fmt: skip


def _paged(bench: Bench, keys: Packed, values: Packed, dtype: torch.dtype) -> float:
    """A step of rows with different numbers of pages, one of them none."""
    page, heads, d, counts = 128, 2, 64, [3 * 128 + 1, 7, 2 * 128, 1]
    width = 3
    number, views = width * len(counts), []
    for fmt in (keys, values):
        tokens = PackedTokens(fmt, None)
        tokens.append(torch.randn(number, heads, page, d, device=bench.device).to(dtype))
        tail = torch.randn(len(counts), heads, page, d, device=bench.device).to(dtype)
        views.append(KVView(tokens.view(), tail, fmt.encoding))
    blocks = torch.randperm(number).view(len(counts), width)
    packed = [(n - 1) // page * page for n in counts]
    columns = (blocks, torch.tensor(packed), torch.tensor(counts), torch.arange(len(counts)))
    table = PageTable(*(x.to(bench.device) for x in columns), page, max(counts))
    q = torch.randn(len(counts), 4 * heads, 1, d, device=bench.device).to(dtype)
    state = _by_kernel(q, [Region(*views, Paged(table))])
    exact = [
        KVView(x.packed._replace(dtype=torch.float32), x.exact.float(), x.encoding) for x in views
    ]
    want = attend_ref.attend_regions(q.float(), [Region(*exact, Paged(table))], d**-0.5)
    return max(_away(state.out, want.out), _away(state.lse, want.lse))


def _models(bench: Bench, fast: bool) -> Iterator[Case]:
    for recipe in ("small",) if fast else ("near-lossless", "small", "tiny"):
        yield (
            "step of a model", recipe, _CLOSE[torch.float32],
            lambda name=recipe: _model_step(bench, name),
        )  # fmt: skip
    if not bench.dry:
        for recipe in ("near-lossless", "small"):
            yield (
                "recorded steps", recipe, _CLOSE[torch.float32],
                lambda name=recipe: _recorded_steps(bench, name),
            )  # fmt: skip


@torch.inference_mode()
def _recorded_steps(bench: Bench, recipe: str, steps: int = 70) -> float:
    """Steps of a small model that are replayed, beside the same ones that run."""
    with bench.device:
        model = random_llama(ModelShape(8, 2, 64, 1, torch.float32, 2, 512, 256, 199), 1400)
        ids = torch.randint(0, 199, (2, 1200 + steps))
    cache = kvloom.Cache(model, recipe)
    model(input_ids=ids[:, :1200], past_key_values=cache, use_cache=True, logits_to_keep=1)
    results = []
    for record in (partial(cuda_graphs.record, bench.device), _run_again):
        graphs, copied = recorded_steps.Graphs(record), copy.deepcopy(cache)
        with cuda_graphs.replayed(model, graphs):
            for i in range(1200, 1200 + steps):
                place = torch.full((1, 1), i, device=bench.device)
                step = model(ids[:, i : i + 1], position_ids=place, past_key_values=copied)
                results.append(step.logits[:, -1])
        if graphs.refused or not graphs.checked:
            raise RuntimeError(graphs.refused or "no replay was checked")
    return _away(torch.stack(results[:steps]), torch.stack(results[steps:]))


def _run_again(run: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Run a function in place of each replay."""
    out = run()

    def replay() -> None:
        out.logits.copy_(run().logits)

    return replay, out


@torch.inference_mode()
def _model_step(bench: Bench, recipe: str) -> float:
    """A step of a small model by the kernels, beside one by the reference on the same device."""
    tokens = 300 if bench.dry else 1200
    with bench.device:
        model = random_llama(ModelShape(8, 2, 64, 1, torch.float32, 2, 512, 256, 199), 2 * tokens)
        ids = torch.randint(0, 199, (2, tokens + 1))
    cache = kvloom.Cache(model, recipe)
    with use_backend("ref"):  # so that both evict the same tokens
        model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
    logits = []
    for backend in ("gpu", "ref"):
        before = operations_run()
        with use_backend(backend):
            step = model(input_ids=ids[:, -1:], past_key_values=copy.deepcopy(cache))
        logits.append(step.logits)
        ran = operations_run() - before
        left = [why for op, by, why in ran if op == "attend" and by == "ref"]
        if backend == "gpu" and (left or not ran["attend", "gpu", ""]):
            raise RuntimeError(f"left to the reference: {'; '.join(left)}")
    return _away(*logits)
