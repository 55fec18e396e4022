"""SKVQ: sliding-window key and value cache quantization (arXiv:2405.06219)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvloom.hf import load_layer_facts
from kvloom.recipe import Geometry, Protect, Recipe, resolve

from . import simulated
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

CLIP, GROUP = 0.96, 64  # the official code's in Table 2
TABLE2 = ("RTN-sym", "RTN", "KVQuant", "SKVQ")
BARE = "group=32,reorder=false,clip=1.0,sinks=0,meta=fp16"
LADDER = (
    named(f"skvq:{BARE},window=0", "RTN"),
    named(f"skvq:{BARE}", "+ window 128"),
    named("skvq:group=32,reorder=false,sinks=0,meta=fp16", "+ clipping"),
    named("skvq:group=32,sinks=0,meta=fp16", "+ reorder"),
    named("skvq:group=32,meta=fp16", "+ sinks"),
    named("skvq:group=32", "+ FP8"),
)
CALIBRATED = (
    "smoothquant", "smoothquant:meta=fp8", "rptq", "skvq:group=32", "skvq:group=64",
    "skvq:group=128", "skvq:group=32,reorder=false", "skvq-k2v1.5:group=64",
    "skvq-k2v1.5:group=128",
    *(f"skvq:group={GROUP},bits={bits},value_bits={bits},clip={CLIP}" for bits in (4, 3, 2)),
)  # fmt: skip
"""Recipes with all formats for which the claims need a calibration."""
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
        ours = f"skvq:group=64,window=0,bits={bits},value_bits={bits},clip={CLIP}"
        names += [
            replace(resolve(f"rtn:bits={bits},group=64"), name=f"RTN {bits}bit"),
            named(ours, f"SKVQ {bits}bit"),
        ]
    qualities = lab.quality(names)
    return ordered(qualities, *((f"SKVQ {b}bit", f"RTN {b}bit") for b in (4, 3, 2)))


def _quantizer(
    method: str, bits: int, x: Tensor, side: str, groups: Tensor | None
) -> simulated.Quantizer:
    """Return a method of Table 2 for a layer's keys or values.

    x: fp32 [T, channels], of another text. groups: int64 [Hk, D], SKVQ's.
    """
    if method == "RTN-sym":
        return partial(simulated.symmetric, bits=bits, group=GROUP)
    if method == "KVQuant":
        return simulated.Levels.fit(x, bits, 0 if side == "keys" else 1)
    if method == "RTN" or groups is None:
        return partial(simulated.asymmetric, bits=bits, group_of=torch.arange(x.shape[1]) // GROUP)
    return partial(simulated.asymmetric, bits=bits, group_of=groups.flatten(), clip=CLIP)


def _table2(lab: Lab) -> Finding:
    """Measure the methods of Table 2 in its own way: one pass over texts, everything quantized."""
    if not simulated.projections(lab.model):
        raise NotTestable("keys and values of this model are not made by k_proj and v_proj")
    facts = load_layer_facts(lab.model, resolve(f"skvq:group={GROUP},clip={CLIP}"))
    texts, another = lab.texts(7, lab.context).split([6, 1])
    outputs = simulated.outputs(lab.model, another)

    def nats(method: str, bits: int) -> np.ndarray:
        quantizers = {
            (layer, side): _quantizer(method, bits, x, side, getattr(facts[layer], side).group_of)
            for (layer, side), x in outputs.items()
        }
        return np.array(simulated.losses(lab.model, texts, quantizers))

    full = math.exp(np.mean(simulated.losses(lab.model, texts, {})))
    found = {name: {bits: nats(name, bits) for bits in (4, 3, 2)} for name in TABLE2}
    rows = {name: tuple(math.exp(x.mean()) for x in by.values()) for name, by in found.items()}
    gaps = {
        (name, bits): difference(found["SKVQ"][bits], found[name][bits])
        for name, bits in (("RTN-sym", 4), ("RTN-sym", 3), ("RTN-sym", 2), ("KVQuant", 2))
    }
    return Finding(
        ClaimTable(("4bit", "3bit", "2bit"), {"FP16": (full,) * 3, **rows}),
        all(gap.high < 0 for gap in gaps.values()),
        "; ".join(f"nats of SKVQ minus {name}, {b}bit: {x}" for (name, b), x in gaps.items()),
    )


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
    group = min(128, lab.geometry.head_dim)  # KIVI's values take at most a head
    recipes = [
        named("skvq-k2v1.5:group=128", "SKVQ K2V1.5"),
        named(f"kivi:group={group}", "KIVI K2V2"),
    ]
    answers = lab.needles(recipes, "multikey")
    require_retrieval(answers)
    gap = difference(answers["KIVI K2V2"], answers["SKVQ K2V1.5"])
    if min(float(x.mean()) for x in answers.values()) >= 0.95:
        raise NotTestable("all methods find at least 95% of the needles, so they cannot be ordered")
    return Finding(shares(answers), gap.high < 0, f"KIVI minus SKVQ: {gap}")


def _smooth(lab: Lab) -> Finding:
    smooth: Recipe = replace(
        resolve("smoothquant:meta=fp8"), protect=Protect(5, 128), name="SKVQ-smooth"
    )
    qualities = lab.quality([smooth, named("skvq:group=32", "SKVQ-reorder")])
    return ordered(qualities, ("SKVQ-reorder", "SKVQ-smooth"))


def _million(lab: Lab) -> Finding:
    tokens = 1_000_000
    specs = {"FP16": "full", "K2V2": "skvq", "K2V1.5": "skvq-k2v1.5"}
    gb = {
        name: (WEIGHTS_7B + resolve(spec).nbytes(tokens, LLAMA_7B)) / 1e9
        for name, spec in specs.items()
    }
    return Finding(
        ClaimTable(tuple(gb), {"GB": tuple(gb.values())}),
        gb["K2V1.5"] <= 80,
        f"weights and cache: {gb['K2V1.5']:.1f} GB with K2V1.5, {gb['K2V2']:.1f} GB with K2V2",
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
