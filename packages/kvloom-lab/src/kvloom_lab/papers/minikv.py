"""MiniKV: 2-bit layer-discriminative KV cache (arXiv:2411.18077)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe import Geometry, Recipe, resolve
from kvloom.store import Packed, Store

from ..eval.evaluate import at_share
from .claim import (
    AS_GOOD,
    KEEPS,
    ClaimTable,
    Finding,
    all_hold,
    difference,
    kept,
    ordered,
    quality_figures,
)
from .lab import Lab, Quality, named
from .speed import LLAMA_2_7B, speedup, stated

LLAMA_7B = Geometry(32, 32, 32, 128, torch.float16)
POLICIES = {
    "uniform": "Uniform",
    "pyramid": "Pyramid",
    "variance": "Var-prop",
    "inverse-variance": "Var-inv",
}
RECENT = (0.0, 0.2, 0.5, 0.8, 1.0)


def _h2o(bits: int | None, axes: str = "TT") -> Recipe:
    """Return half of the prompt by H2O's score, chosen once, at a bit width (None: 16)."""
    keep = Keep(Budget(fraction=0.5, recent=0.5, round_shares=True), Mass(), when="prompt")
    if bits is None:
        return Recipe(keep=keep, name="16bit")
    axis = {"C": "channel", "T": "token"}
    keys, values = (Packed(bits, axis[x], 16, residual=128, unit=16) for x in axes)
    name = f"INT{bits}" if axes == "TT" else f"INT{bits} sub-channel"
    return Recipe(keep=keep, store=Store(keys, values), name=name)


def _same_bytes(lab: Lab) -> dict[str, Quality]:
    """Measure MiniKV, and H2O and SnapKV at the budget that takes MiniKV's bytes.

    MiniKV and SnapKV keep all generated tokens, and H2O does not: its budget has room for them.
    """
    context, geometry = lab.context, lab.geometry
    packed, exact = resolve("minikv").nbytes(context, geometry), geometry.token_nbytes()
    rivals = [
        replace(at_share(resolve(name), tokens / context, context, geometry), name=shown)
        for name, shown, tokens in (
            ("h2o", "H2O", packed / exact + lab.size.new_tokens),
            ("snapkv", "SnapKV", packed / exact),
        )
    ]
    return lab.quality(
        [
            named("kivi:group=16", "KIVI"),
            *rivals,
            named("minikv", "MiniKV"),
            named("minikv-pyramid", "MiniKV Pyramid"),
        ]
    )


def _beats_h2o(lab: Lab) -> Finding:
    return ordered(_same_bytes(lab), ("MiniKV", "H2O"), ("MiniKV Pyramid", "H2O"))


def _beats_snapkv(lab: Lab) -> Finding:
    return ordered(_same_bytes(lab), ("MiniKV Pyramid", "SnapKV"))


def _keeps(lab: Lab) -> Finding:
    return kept(_same_bytes(lab), {"MiniKV Pyramid": KEEPS})


def _kivi(lab: Lab) -> Finding:
    qualities = _same_bytes(lab)
    order = ordered(qualities, ("KIVI", "MiniKV Pyramid"))
    ratio = qualities["KIVI"].bytes_share / qualities["MiniKV Pyramid"].bytes_share
    return all_hold(
        order, Finding(order.ours, ratio > 1.2, f"bytes of KIVI over MiniKV's: {ratio:.2f}")
    )


def _pyramid(lab: Lab) -> Finding:
    recipes = [named(f"minikv:layers={key}", name) for key, name in POLICIES.items()]
    return ordered(
        lab.quality(recipes), *(("Pyramid", x) for x in POLICIES.values() if x != "Pyramid")
    )


def _int2(lab: Lab) -> Finding:
    qualities = lab.quality([_h2o(None), _h2o(8), _h2o(4), _h2o(2)])
    ratios = {
        name: qualities[name].perplexity / qualities["16bit"].perplexity
        for name in ("INT8", "INT4", "INT2")
    }
    holds = ratios["INT8"] <= AS_GOOD and ratios["INT4"] <= AS_GOOD and ratios["INT2"] > KEEPS
    evidence = "; ".join(f"{name} over 16bit: {x:.3f}" for name, x in ratios.items())
    return Finding(quality_figures(qualities), holds, evidence)


def _sub_channel(lab: Lab) -> Finding:
    qualities = lab.quality([_h2o(None), _h2o(2), _h2o(2, "CT")])
    return ordered(qualities, ("INT2 sub-channel", "INT2"))


def _mixture(lab: Lab) -> Finding:
    recipes = [named(f"h2o:fraction=0.5,recent={r}", f"recent {r:.0%}") for r in RECENT]
    return ordered(lab.quality(recipes), ("recent 50%", "recent 0%"), ("recent 50%", "recent 100%"))


def _frozen(lab: Lab) -> Finding:
    qualities = lab.quality(
        [replace(_h2o(None), name="chosen once"), named("h2o:fraction=0.5", "at every step")]
    )
    ratio = qualities["chosen once"].perplexity / qualities["at every step"].perplexity
    gap = difference(qualities["chosen once"].kl, qualities["at every step"].kl)
    return Finding(
        quality_figures(qualities),
        ratio <= AS_GOOD,
        f"perplexity of chosen once over at every step: {ratio:.4f}; KL minus: {gap}",
    )


def _fixed_tenth(lab: Lab) -> Finding:
    """One of heavy hitters and recent tokens has 10% of the prompt, the other more and more."""
    recipes, pairs = [], []
    for more in (0.05, 0.2, 0.45):
        heavy, recent = (f"{what} {more:.0%}" for what in ("heavy", "recent"))
        for name, share in ((heavy, 0.1), (recent, more)):
            total = 0.1 + more
            recipes.append(named(f"h2o:fraction={total:.2f},recent={share / total:.4f}", name))
        pairs.append((heavy, recent))
    qualities = lab.quality(recipes)
    found = {pair: difference(qualities[pair[0]].kl, qualities[pair[1]].kl) for pair in pairs}
    return Finding(
        quality_figures(qualities),
        len({x.mean > 0 for x in found.values()}) > 1
        or all(x.low <= 0 <= x.high for x in found.values()),
        "; ".join(f"KL of {a} minus {b}: {x}" for (a, b), x in found.items()),
    )


def _much_eviction(lab: Lab) -> Finding:
    shares = (0.5, 0.2, 0.1, 0.05)
    recipes = [
        named(f"{name}:fraction={share}", f"{shown} {share:.0%}")
        for name, shown in (("h2o", "H2O"), ("snapkv", "SnapKV"))
        for share in shares
    ]
    qualities = lab.quality(recipes)
    half = kept(qualities, {"H2O 50%": KEEPS, "SnapKV 50%": KEEPS})
    less = [recipe.name for recipe in recipes if "50%" not in recipe.name]
    best = min(less, key=lambda name: qualities[name].ratio)
    lost = Finding(
        half.ours,
        qualities[best].ratio > KEEPS,
        f"best of 20, 10 and 5%: {best}, {qualities[best].ratio:.3f} (must be above {KEEPS})",
    )
    return all_hold(half, lost)


def _lower_layers(lab: Lab) -> Finding:
    most = [layer.most for layer in lab.attention_layers()]
    half = len(most) // 2
    lower, upper = float(np.mean(most[:half])), float(np.mean(most[half:]))
    return Finding(
        ClaimTable(
            ("tokens with 90% of the attention",),
            {"lower half of the layers": (lower,), "upper half": (upper,)},
        ),
        lower > upper,
        f"lower layers {lower:.0%} of the tokens, upper layers {upper:.0%}",
    )


def _variance(lab: Lab) -> Finding:
    variances = np.array([[x.variance for x in layers] for layers in lab.attention_of_texts(3)])
    ranks = variances.argsort(axis=1).argsort(axis=1)
    least = float(np.corrcoef(ranks).min())
    return Finding(
        ClaimTable(
            ("text 1", "text 2", "text 3"),
            {f"layer {i}": tuple(map(float, x)) for i, x in enumerate(variances.T)},
        ),
        least >= 0.9,
        f"smallest rank correlation over layers of two texts: {least:.3f}",
    )


def _bytes(lab: Lab) -> Finding:
    prompt, generated = 4096, 512
    exact = (prompt + generated) * LLAMA_7B.token_nbytes()
    minikv = resolve("minikv")
    packed = minikv.nbytes(prompt, LLAMA_7B) + Recipe(store=minikv.store).nbytes(
        generated, LLAMA_7B
    )
    h2o = resolve("h2o:fraction=0.15").nbytes(prompt, LLAMA_7B)
    rows = {"Full": (exact / 1e9,), "H2O (15%)": (h2o / 1e9,), "MiniKV": (packed / 1e9,)}
    return Finding(
        ClaimTable(("GB",), rows),
        packed <= 0.15 * exact,
        f"MiniKV is {1 - packed / exact:.1%} smaller",
    )


def _speed(lab: Lab) -> Finding:
    by_length = {
        tokens: lab.steps(LLAMA_2_7B, ["full", "kivi", "minikv"], tokens)
        for tokens in (4096, 22_016, 32_768)
    }
    rows = {
        f"{tokens:,}": [speedup(steps, name, "kivi") for name in ("full", "kivi", "minikv")]
        for tokens, steps in by_length.items()
    }
    later = list(by_length.values())[1:]
    return Finding(
        ClaimTable(("full", "KIVI", "MiniKV"), rows),
        min(speedup(steps, "minikv", "kivi") for steps in later) > 1,
        "; ".join(stated(steps, "minikv", "kivi") for steps in later),
    )
