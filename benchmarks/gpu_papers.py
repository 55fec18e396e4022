"""Sections `kivi`, `minikv`, `keyformer`, `clusterkv`, `generate`: the papers' system tables.

Every row has the paper's figure beside ours. Theirs are of other GPUs (A100, Ada 6000) and, for
Keyformer, of another model (MPT-7B): ratios to the full cache are what compares. Models have random
weights; no figure here depends on what they say.
"""

from __future__ import annotations

import torch

from gpu_clock import Bench
from gpu_models import (
    RECORDED,
    Run,
    cache_of,
    decode_in_full_memory,
    fits,
    model,
    run,
    static_ms,
)

LLAMA2, LLAMA3 = "Llama-2-7B", "Llama-3-8B"


def kivi(bench: Bench) -> None:
    """KIVI, figure 5: 161 tokens in, 338 out, batch until memory is full; Llama-2-7B."""
    prompt, new, shape = 161, 338, LLAMA2
    full = _largest(bench, shape, "DynamicCache", prompt, new)
    if full is None:
        return
    bench.row("DynamicCache, memory full", full.figures())
    for recipe in (f"kivi:residual=32{RECORDED}", f"kivi{RECORDED}"):
        name, paper = f"{recipe}, same batch", "2.6x less peak memory"
        if not bench.skip(name, 10):
            with bench.guarded(name, paper):
                same = run(bench, shape, recipe, prompt, new, full.batch)
                ratio = full.peak_gb / (same.peak_gb or float("nan"))
                smaller = {"x less peak memory": ratio, "x less cache": full.kept / same.kept}
                bench.row(name, {**smaller, **same.figures()}, paper)
        name, paper = f"{recipe}, memory full", "2.35x to 3.47x throughput, 4x the batch"
        if not bench.skip(name, 15):
            most = _largest(bench, shape, recipe, prompt, new, 4 * full.batch)
            if most is not None:
                ratios = {
                    "x throughput": most.processed_s / full.processed_s,
                    "x batch": most.batch / full.batch,
                }
                bench.row(name, {**ratios, **most.figures()}, paper)


def _largest(
    bench: Bench, shape: str, recipe: str, prompt: int, new: int, most: int = 1 << 20
) -> Run | None:
    """A run at the largest batch that fits: what caches leave room for, less until it does."""
    model(bench, shape)
    batch = min(most, fits(bench, shape, recipe, prompt + new, 0.85 * bench.room_gb()))
    for _ in range(4):
        if bench.skip(f"{recipe} at batch {batch}", 8):
            return None
        try:
            return run(bench, shape, recipe, prompt, new, batch, steps=8)
        except torch.OutOfMemoryError:
            pass  # outside of this block nothing holds on to the tensors
        bench.free()
        batch = max(1, int(0.75 * batch))
    bench.row(f"{recipe}, memory full", {}, note=f"out of memory at batch {batch}")
    return None


def minikv(bench: Bench) -> None:
    """MiniKV, figures 11 to 13, in 40 GB as on their GPU; Llama-2-7B."""
    model(bench, LLAMA2)
    with bench.limited(40.0):
        _crossover(bench)
        _throughput(bench)
        _longest(bench)


def _crossover(bench: Bench) -> None:
    """Latency of one sequence, 1024 new tokens, by prompt."""
    for prompt in (2_048, 8_192, 22_000, 32_768):
        runs: dict[str, Run] = {}
        for recipe in (f"kivi:group=16{RECORDED}", f"minikv{RECORDED}"):
            name = f"latency, prompt {prompt}: {recipe}"
            if bench.skip(name, 6):
                continue
            with bench.guarded(name):
                runs[recipe] = run(bench, LLAMA2, recipe, prompt, 1024, steps=8)
        if len(runs) == 2:
            a, b = runs.values()
            figures = {
                "kivi s": a.latency, "minikv s": b.latency, "x": a.latency / b.latency,
                "kivi ms a step": 1e3 * a.step, "minikv ms a step": 1e3 * b.step,
                "kivi prefill s": a.prefill, "minikv prefill s": b.prefill,
            }  # fmt: skip
            bench.row(f"latency, prompt {prompt}", figures, "faster than KIVI above 22k")


def _throughput(bench: Bench) -> None:
    """Prompt 2048, 1024 new tokens, batch until memory is full."""
    found = {}
    kivi, minikv = f"kivi:group=16{RECORDED}", f"minikv{RECORDED}"
    for recipe in ("DynamicCache", kivi, minikv):
        most = _largest(bench, LLAMA2, recipe, 2048, 1024, 128)
        if most is not None:
            found[recipe] = most
            bench.row(
                f"throughput: {recipe}",
                {"processed/s": most.processed_s, **most.figures()},
            )
    if minikv in found and kivi in found:
        ratio = found[minikv].processed_s / found[kivi].processed_s
        bench.row("throughput, minikv beside kivi", {"x": ratio}, "1.66x")


def _longest(bench: Bench) -> None:
    """The longest prompt of one sequence."""
    for recipe, paper in (("full", ""), ("kivi:group=16", "40k"), ("minikv", "44k")):
        best, why = 0, "and more: not tried"
        for prompt in (16_384, 32_768, 44_000, 65_536, 98_304):
            if bench.skip(f"longest prompt of {recipe}: {prompt}", 8):
                why = "no time for more"
                break
            try:
                run(bench, LLAMA2, recipe, prompt, 64, steps=2)
                best = prompt
            except torch.OutOfMemoryError:
                why = f"{prompt} does not fit"
                break
        bench.free()
        bench.row(f"longest prompt in 40 GB: {recipe}", {"tokens": best}, paper, why)


KEYFORMER = {  # tokens/s: full, h2o at 90%, keyformer at 50%; MPT-7B, A100 (table 1)
    (1024, 1): (24.9, 27.8, 32.0),
    (2048, 1): (15.0, 20.5, 24.3),
    (4096, 1): (8.3, 14.1, 17.0),
    (4096, 2): (None, None, 19.85),
}


def keyformer(bench: Bench) -> None:
    """Keyformer, table 1 and figure 9: as many tokens out as in; Llama-2-7B shape."""
    recipes = ("DynamicCache", "h2o:fraction=0.9", "keyformer:fraction=0.5")
    for (tokens, batch), theirs in KEYFORMER.items():
        base: Run | None = None
        for recipe, paper in zip(recipes, theirs, strict=True):
            name = f"{tokens}+{tokens} x {batch}: {recipe}"
            claimed = f"{paper} tokens/s" if paper else "out of memory"
            if recipe == recipes[2] and (tokens, batch) == (4096, 1):
                claimed += ", 2.1x latency"
            if bench.skip(name, 4):
                continue
            with bench.guarded(name, claimed):
                measured = run(bench, LLAMA2, recipe, tokens, tokens, batch)
                base = base or measured
                ratio = {"x latency": base.latency / measured.latency}
                bench.row(name, {**ratio, **measured.figures()}, claimed)


def clusterkv(bench: Bench) -> None:
    """ClusterKV, figure 12 and section V-C: one sequence, budgets and lengths; Llama-3-8B."""
    for prompt in (8_192, 16_384, 32_768):
        base: dict[int, Run] = {}
        for new in (256, 1024):
            name = f"{prompt}+{new}: DynamicCache"
            if not bench.skip(name, 4):
                with bench.guarded(name):
                    base[new] = run(bench, LLAMA3, "DynamicCache", prompt, new)
                    bench.row(name, base[new].figures())
        for tokens in (256, 512, 1024, 2048) if prompt == 32_768 else (1024,):
            for new in (256, 1024):
                name = f"{prompt}+{new}: clusterkv, {tokens} tokens"
                if new not in base or bench.skip(name, 4):
                    continue
                paper = ""
                if (prompt, new, tokens) == (32_768, 1024, 1024):
                    paper = "2x latency, 2.5x decoding, clustering 6-8% of prefill"
                with bench.guarded(name, paper):
                    recipe = f"clusterkv:tokens={tokens}"
                    if bench.dry:  # so that one layer recalls some of 40 tokens
                        recipe = "clusterkv:tokens=16,size=4,sinks=2,full_layers=0"
                    measured = run(bench, LLAMA3, recipe, prompt, new)
                    full = base[new]
                    figures = {
                        "x latency": full.latency / measured.latency,
                        "x decoding": measured.tokens_s / full.tokens_s,
                        "clustering of prefill": 1 - full.prefill / measured.prefill,
                    }
                    bench.row(name, {**figures, **measured.figures()}, paper)


def generate(bench: Bench) -> None:
    """Llama-3-8B, decoding beside transformers' caches, by prompt and batch."""
    recorded = ("near-lossless", "small", "tiny", "kivi", "full")
    recipes = ("DynamicCache", *(name + RECORDED for name in recorded), "near-lossless", "small")
    for prompt, batch in ((8_192, 8), (2_048, 1), (32_768, 4)):
        base: Run | None = None
        name = f"{prompt} x {batch}: StaticCache{RECORDED}"
        if not (bench.dry or bench.skip(name, 5)):
            with bench.guarded(name):
                ms = static_ms(bench, LLAMA3, prompt, 128, batch)
                bench.row(name, {"ms a step": ms})
        for recipe in recipes:
            name = f"{prompt} x {batch}: {recipe}"
            if bench.skip(name, 5):
                continue
            with bench.guarded(name):
                found = run(bench, LLAMA3, recipe, prompt, 128, batch)
                base = base or found
                ratio = {"x decoding": found.tokens_s / base.tokens_s}
                bench.row(name, {**ratio, **found.figures()})
    _quantized(bench)


def throughput(bench: Bench) -> None:
    """Llama-3-8B in 80 GB, weights included: sequences of 8,192 tokens, as many as fit."""
    model(bench, LLAMA3)
    with bench.limited(80.0):
        base: float | None = None
        for recipe in ("DynamicCache", *(x + RECORDED for x in ("near-lossless", "small", "tiny"))):
            if bench.skip(recipe, 12):
                continue
            with bench.guarded(recipe):
                figures = decode_in_full_memory(bench, LLAMA3, recipe, 8_192).figures()
                base = base or figures["tokens/s"]
                bench.row(recipe, {"x DynamicCache": figures["tokens/s"] / base, **figures})


def _quantized(bench: Bench) -> None:
    """transformers' QuantizedCache, where its backend is installed."""
    name = "8192 x 1: QuantizedCache, 4 bit"
    if bench.skip(name, 10):
        return
    with bench.guarded(name):
        try:
            cache_of(bench, LLAMA3, "QuantizedCache")()
        except ImportError as error:
            bench.row(name, {}, note=str(error).splitlines()[0])
            return
        bench.row(name, run(bench, LLAMA3, "QuantizedCache", 8_192, 128).figures())
