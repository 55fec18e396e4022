"""SKVQ: sliding-window key and value cache quantization (arXiv:2405.06219)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch

from kvloom.recipe import Geometry, Protect, Recipe, resolve

from .claim import (
    KEEPS,
    ClaimTable,
    Finding,
    NotTestable,
    all_hold,
    difference,
    kept,
    monotone,
    ordered,
    quality_figures,
    require_retrieval,
    shares,
)
from .lab import Lab, named

METHODS = (
    named("rtn", "RTN"),
    named("smoothquant", "SmoothQuant"),
    named("rptq", "RPTQ"),
    named("kivi", "KIVI"),
    named("skvq:group=32", "SKVQ"),
)

BARE = "group=32,reorder=false,clip=1.0,sinks=0,meta=fp16"
LADDER = (
    named(f"skvq:{BARE},window=0", "RTN"),
    named(f"skvq:{BARE}", "+ window 128"),
    named("skvq:group=32,reorder=false,sinks=0,meta=fp16", "+ clipping"),
    named("skvq:group=32,sinks=0,meta=fp16", "+ reorder"),
    named("skvq:group=32,meta=fp16", "+ sinks"),
    named("skvq:group=32", "+ FP8"),
)
LLAMA_7B = Geometry(32, 32, 32, 128, torch.float16)
WEIGHTS_7B = 2 * 6_738_415_616  # bytes of Llama-2-7B in fp16


def _table1(lab: Lab) -> Finding:
    return ordered(
        lab.quality(METHODS), *(("SKVQ", name) for name in ("RTN", "SmoothQuant", "RPTQ", "KIVI"))
    )


def _loss(lab: Lab) -> Finding:
    return kept(lab.quality([named("skvq:group=32", "SKVQ")]), {"SKVQ": KEEPS})


def _no_window(lab: Lab) -> Finding:
    names = []
    for bits in (4, 3, 2):
        ours = f"skvq:group=64,window=0,bits={bits},value_bits={bits}"
        names += [
            replace(resolve(f"rtn:bits={bits},group=64"), name=f"RTN {bits}bit"),
            named(ours, f"SKVQ {bits}bit"),
        ]
    qualities = lab.quality(names)
    return ordered(qualities, *((f"SKVQ {b}bit", f"RTN {b}bit") for b in (4, 3, 2)))


def _window_most(lab: Lab) -> Finding:
    qualities = lab.quality(LADDER)
    names = [recipe.name for recipe in LADDER]
    gains = {b: difference(qualities[a].kl, qualities[b].kl).mean for a, b in pairwise(names)}
    best = max(gains, key=lambda name: gains[name])
    first = ordered(qualities, ("+ window 128", "RTN"))
    return all_hold(
        first,
        Finding(
            first.ours,
            best == "+ window 128",
            f"largest fall of the KL: {best} ({gains[best]:.3g})",
        ),
    )


def _parts(lab: Lab) -> Finding:
    return monotone(lab.quality(LADDER), [recipe.name for recipe in LADDER[1:5]])


def _fp8(lab: Lab) -> Finding:
    qualities = lab.quality(LADDER)
    ratio = float(qualities["+ FP8"].kl.mean() / qualities["+ sinks"].kl.mean())
    return Finding(quality_figures(qualities), ratio <= 1.1, f"KL with fp8 over fp16: {ratio:.3f}")


def _group(lab: Lab) -> Finding:
    recipes = [named(f"skvq:group={g}", f"group {g}") for g in (128, 64, 32)]
    return monotone(lab.quality(recipes), [recipe.name for recipe in recipes])


def _window_size(lab: Lab) -> Finding:
    recipes = [named(f"skvq:group=32,window={w}", f"window {w}") for w in (0, 32, 64, 128, 256)]
    return monotone(lab.quality(recipes), [recipe.name for recipe in recipes])


def _k2v15(lab: Lab) -> Finding:
    return kept(lab.quality([named("skvq-k2v1.5:group=64", "K2V1.5")]), {"K2V1.5": KEEPS})


def _needles(lab: Lab) -> Finding:
    recipes = [
        named("skvq-k2v1.5:group=128", "SKVQ K2V1.5"),
        named(f"kivi:group={_head(lab)}", "KIVI K2V2"),
    ]
    answers = lab.needles(recipes, "multikey")
    require_retrieval(answers)
    gap = difference(answers["KIVI K2V2"], answers["SKVQ K2V1.5"])
    if min(float(x.mean()) for x in answers.values()) >= 0.95:
        raise NotTestable("all methods find at least 95% of the needles, so they cannot be ordered")
    return Finding(shares(answers), gap.high < 0, f"KIVI minus SKVQ: {gap}")


def _head(lab: Lab) -> int:
    """Return the group nearest to 128 that KIVI takes for values: at most a head."""
    return min(128, lab.geometry.head_dim)


def _smooth(lab: Lab) -> Finding:
    smooth: Recipe = replace(
        resolve("smoothquant:meta=fp8"), protect=Protect(5, 128), name="SKVQ-smooth"
    )
    qualities = lab.quality([smooth, named("skvq:group=32", "SKVQ-reorder")])
    return ordered(qualities, ("SKVQ-reorder", "SKVQ-smooth"))


def _million(lab: Lab) -> Finding:
    recipe = resolve("skvq:group=128")
    tokens = 1_000_000
    cache, exact = recipe.nbytes(tokens, LLAMA_7B), tokens * LLAMA_7B.token_nbytes()
    rows = {
        "FP16": ((WEIGHTS_7B + exact) / 1e9,),
        "SKVQ K2V2, group 128": ((WEIGHTS_7B + cache) / 1e9,),
    }
    total = WEIGHTS_7B + cache
    return Finding(
        ClaimTable(("GB",), rows),
        total <= 80 * 2**30,
        f"weights and cache: {total / 1e9:.1f} GB, {total / 2**30:.1f} GiB of 80 GiB",
    )


def _roofline(lab: Lab) -> Finding:
    batch, tokens, bandwidth = 128, 200_000, 2039e9
    specs = {"FP16": "full", "KV4": "skvq:bits=4,value_bits=4", "KV2": "skvq"}
    ms = {
        name: 1e3 * (WEIGHTS_7B + batch * resolve(spec).nbytes(tokens, LLAMA_7B)) / bandwidth
        for name, spec in specs.items()
    }
    ratio = ms["FP16"] / ms["KV2"]
    return Finding(
        ClaimTable(tuple(specs), {"inference time (ms)": tuple(ms.values())}),
        ratio >= 7,
        f"FP16 over KV2: {ratio:.2f}; the paper's times read half of the cache",
    )
