"""Keyformer: KV cache reduction through key tokens selection (arXiv:2403.09054)."""

from __future__ import annotations

import numpy as np

from .claim import (
    AS_GOOD,
    ClaimTable,
    Finding,
    all_hold,
    difference,
    kept,
    ordered,
    quality_figures,
)
from .lab import Lab, Quality, named
from .speed import EXACT, MPT_7B, speedup, stated

BUDGETS = (0.2, 0.5, 0.7, 0.9)
NOISES = ("gumbel", "gaussian", "constant", "none")
DAMPING = (1.0, 0.975, 0.95, 0.925, 0.9)
TEMPERATURES = (1.0, 1.5, 2.0, 3.0)
DRAWS = 32
RECENT = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def _at_60(lab: Lab) -> dict[str, Quality]:
    tokens = int(0.6 * lab.context)
    return lab.quality(
        [
            named(f"window:tokens={tokens}", "Window"),
            named("h2o:fraction=0.6,recent=0.3", "H2O"),
            named(f"streaming:tokens={tokens},positions=renumbered", "StreamingLLM"),
            named("keyformer:fraction=0.6,positions=renumbered", "Keyformer (New Pos)"),
            named("keyformer:fraction=0.6", "Keyformer (Org Pos)"),
            named("keyformer:fraction=0.6,shared=true", "Keyformer (Shared)"),
        ]
    )


def _window(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "Window"), ("H2O", "Window"))


def _streaming(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "StreamingLLM"), ("Window", "StreamingLLM"))


def _positions(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "Keyformer (New Pos)"))


def _shared(lab: Lab) -> Finding:
    return ordered(_at_60(lab), ("Keyformer (Org Pos)", "Keyformer (Shared)"))


def _sweep(lab: Lab) -> dict[str, Quality]:
    recipes = []
    for budget in BUDGETS:
        recipes.append(named(f"h2o:fraction={budget},recent=0.3", f"H2O {budget:.0%}"))
        recipes.append(named(f"keyformer:fraction={budget}", f"Keyformer {budget:.0%}"))
    return lab.quality(recipes)


def _beats_h2o(lab: Lab) -> Finding:
    pairs = ((f"Keyformer {b:.0%}", f"H2O {b:.0%}") for b in BUDGETS)
    return ordered(_sweep(lab), *pairs)


def _iso_accuracy(lab: Lab) -> Finding:
    qualities = _sweep(lab)
    keeps = kept(qualities, {"Keyformer 70%": AS_GOOD})
    ratio = qualities["H2O 90%"].ratio
    return all_hold(
        keeps,
        Finding(keeps.ours, ratio > AS_GOOD, f"H2O 90%: {ratio:.4f} (must be above {AS_GOOD})"),
    )


def _noise(lab: Lab) -> Finding:
    qualities = lab.quality([named(f"keyformer:fraction=0.6,noise={x}", x) for x in NOISES])
    return all_hold(
        ordered(qualities, *(("gumbel", x) for x in NOISES[1:])),
        ordered(qualities, ("none", "gaussian"), ("gaussian", "constant")),
    )


def _damping(lab: Lab) -> Finding:
    names = [f"α = {x:g}" for x in DAMPING]
    qualities = lab.quality(
        [
            named(f"h2o:fraction=0.5,recent=0.2,damping={x}", name)
            for x, name in zip(DAMPING, names, strict=True)
        ]
    )
    kl = {name: float(qualities[name].kl.mean()) for name in names}
    best = min(kl, key=lambda name: kl[name])
    return Finding(
        quality_figures(qualities),
        kl[best] >= 0.5 * kl[names[0]],
        f"best: {best}, KL {kl[best]:.4f}; without damping {kl[names[0]]:.4f}",
    )


def _temperature(lab: Lab) -> Finding:
    recipes = [named(f"keyformer:fraction=0.6,tau_end={x}", f"τ to {x:g}") for x in TEMPERATURES]
    pairs = (("τ to 2", recipe.name) for recipe in recipes if recipe.name != "τ to 2")
    return ordered(lab.quality(recipes), *pairs)


def _entropy(lab: Lab) -> Finding:
    """Compare the entropy of weights with that of their mean over draws of noise."""
    entropies = lab.entropies(DRAWS)
    without, gumbel = np.mean(list(entropies.values()), axis=0).tolist()
    above = sum(noised > plain for plain, noised in entropies.values())
    return Finding(
        ClaimTable(("entropy (nats)",), {"none": (without,), "Gumbel": (gumbel,)}),
        gumbel > without,
        f"Gumbel minus none, mean over layers: {gumbel - without:+.2f} nats; above 0 in {above} of "
        f"{len(entropies)} layers",
    )


def _recent(lab: Lab) -> Finding:
    recipes = [named(f"keyformer:fraction=0.5,recent={r}", f"recent {r:.0%}") for r in RECENT]
    qualities = lab.quality(recipes)
    inside = {"recent 20%", "recent 30%"}
    kl = {recipe.name: float(qualities[recipe.name].kl.mean()) for recipe in recipes}
    best = min(kl, key=lambda name: kl[name])
    ends = [name for name in kl if name not in inside]
    intervals = {
        name: difference(qualities[best].kl, qualities[name].kl) for name in ends if name != best
    }
    evidence = f"best: {best}; its KL minus " + "; ".join(f"{n}: {x}" for n, x in intervals.items())
    holds = best in inside and all(x.high < 0 for x in intervals.values())
    return Finding(quality_figures(qualities), holds, evidence)


def _key_tokens(lab: Lab) -> Finding:
    layers = lab.attention_layers()
    most = float(np.mean([layer.most for layer in layers]))
    rows = {f"layer {x.number}": (x.most,) for x in layers} | {"mean": (most,)}
    return Finding(
        ClaimTable(("tokens with 90% of the attention",), rows),
        most <= 0.4,
        f"mean over layers: {most:.0%} of the tokens",
    )


def _throughput(lab: Lab) -> Finding:
    rows, evidence = {}, []
    for prompt in (1024, 2048, 4096):
        h2o, keyformer = f"h2o:tokens={int(0.9 * prompt)}", f"keyformer:tokens={prompt // 2}"
        steps = lab.steps(MPT_7B, [EXACT, h2o, keyformer], prompt + prompt // 2)
        rows[f"{prompt} + {prompt}"] = 1.0, speedup(steps, h2o), speedup(steps, keyformer)
        evidence.append(stated(steps, keyformer))
    faster = [x[-1] for x in rows.values()]
    return Finding(
        ClaimTable(("full", "H2O 90%", "Keyformer 50%"), rows),
        faster[-1] >= 2.0 and faster[-1] > rows["4096 + 4096"][1] and faster == sorted(faster),
        "; ".join(evidence),
    )
