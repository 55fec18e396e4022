"""KIVI: a tuning-free asymmetric 2bit quantization for KV cache (arXiv:2402.02750v2)."""

from __future__ import annotations

import numpy as np

from kvloom.recipe import Protect, Recipe, resolve
from kvloom.store import Packed, Store

from .claim import (
    KEEPS,
    LEAST_FOUND,
    ClaimTable,
    Finding,
    all_hold,
    difference,
    kept,
    ordered,
    quality_figures,
    require_retrieval,
    shares,
)
from .lab import Lab, named
from .speed import LLAMA_2_7B, throughput

GROUP = 32


def cell(bits: int, keys: str, values: str) -> Recipe:
    """Return keys and values packed along the axes "C" (channel) or "T" (token), group 32.

    As in Table 3 there is no window. Every cell leaves the newest tokens exact that do not fill a
    group of 32, because a group per channel needs 32 tokens.
    """
    axis = {"C": "channel", "T": "token"}
    packed = [Packed(bits, axis[x], GROUP, residual=GROUP) for x in (keys, values)]
    name = f"{bits}bit (K - {keys}, V - {values})"
    return Recipe(store=Store(packed[0], packed[1]), protect=Protect(), name=name)


FOUR, TT, CC, TC, CT = (
    "4bit (K - T, V - T)", "2bit (K - T, V - T)", "2bit (K - C, V - C)", "2bit (K - T, V - C)",
    "2bit (K - C, V - T)",
)  # fmt: skip
CELLS = (cell(4, "T", "T"), *(cell(2, k, v) for k, v in ("TT", "CC", "TC", "CT")))


def _four_bit(lab: Lab) -> Finding:
    qualities = lab.quality(CELLS)
    keeps = kept(qualities, {FOUR: KEEPS})
    drop = qualities[TT].ratio
    return all_hold(
        keeps,
        Finding(keeps.ours, drop > KEEPS, f"{TT}: {drop:.3f} (must be above {KEEPS})"),
        ordered(qualities, (FOUR, TT)),
    )


def _best_cell(lab: Lab) -> Finding:
    return ordered(lab.quality(CELLS), (CT, TT), (CT, CC), (CT, TC))


def _values_per_channel(lab: Lab) -> Finding:
    return ordered(lab.quality(CELLS), (TT, CC), (TT, TC), (CT, CC), (CT, TC))


def _table2(lab: Lab, *fields: str) -> dict[str, tuple[float, float]]:
    """Return errors per token and per channel at 2 bits: element-wise means, and by norms."""
    rows = {}
    for elementwise, how in ((True, ""), (False, " (norms)")):
        errors = lab.errors([cell(2, "T", "T"), cell(2, "C", "C")], elementwise)
        for field in fields:
            cells = getattr(errors[TT], field), getattr(errors[CC], field)
            rows[f"{field.partition('_')[0]}{how}"] = cells
    return rows


def _key_errors(lab: Lab) -> Finding:
    rows = _table2(lab, "keys", "weights")
    del rows["weights"]  # weights near 0 decide their element-wise mean
    per_token, per_channel = rows["weights (norms)"]
    return Finding(
        ClaimTable(("K Per-Token", "K Per-Channel"), rows),
        per_token >= 2 * per_channel and rows["keys"][0] > rows["keys"][1],
        f"attention error per token is {per_token / per_channel:.2f} times that per channel",
    )


def _value_errors(lab: Lab) -> Finding:
    rows = _table2(lab, "values", "output_values")
    per_token, per_channel = rows["output"]
    return Finding(
        ClaimTable(("V Per-Token", "V Per-Channel"), rows),
        per_channel >= 2 * per_token,
        f"output error per channel is {per_channel / per_token:.2f} times that per token",
    )


def _sparsity(lab: Lab) -> Finding:
    sparsity = float(np.mean([layer.sparsity for layer in lab.attention_layers()]))
    return Finding(
        ClaimTable(("sparsity",), {"mean over layers": (sparsity,)}),
        sparsity >= 0.8,
        f"{sparsity:.1%} of the attention weights",
    )


def _kivi_keeps(lab: Lab) -> Finding:
    return kept(lab.quality(["kivi-4", "kivi"]), {"kivi-4": KEEPS, "kivi": KEEPS})


def _window(lab: Lab) -> Finding:
    return ordered(lab.quality([cell(2, "C", "T"), "kivi"]), ("kivi", CT))


def _grouped(lab: Lab, group: int) -> Recipe:
    """Return KIVI with another group; a group of values is at most a head wide."""
    values = min(group, lab.geometry.head_dim)
    recipe = resolve("kivi")
    store = Store(Packed(2, "channel", group, residual=128), Packed(2, "token", values))
    return Recipe(store=store, protect=recipe.protect, name=f"G = {group}")


def _group_size(lab: Lab) -> Finding:
    recipes = [_grouped(lab, group) for group in (32, 64, 128)]
    qualities = lab.quality(recipes)
    first = difference(qualities["G = 64"].kl, qualities["G = 32"].kl)
    second = difference(qualities["G = 128"].kl, qualities["G = 64"].kl)
    return Finding(
        quality_figures(qualities),
        second.low > 0 and second.mean > first.mean,
        f"KL of 64 minus 32: {first}; of 128 minus 64: {second}",
    )


def _residual(lab: Lab) -> Finding:
    recipes = [named(f"kivi:residual={r}", f"R = {r}") for r in (32, 64, 96, 128)]
    qualities = lab.quality(recipes)
    ratios = [qualities[recipe.name].ratio for recipe in recipes]
    spread = max(ratios) / min(ratios)
    return Finding(
        quality_figures(qualities),
        spread <= 1.02,
        f"largest over smallest perplexity: {spread:.3f}",
    )


def _passkey(lab: Lab) -> Finding:
    variant = "passkey"
    answers = lab.needles(["kivi-4", "kivi"], variant)
    if answers["full"].mean() < LEAST_FOUND:
        variant = "multikey"
        answers = lab.needles(["kivi-4", "kivi"], variant)
    require_retrieval(answers)
    least = float(answers["full"].mean()) - 0.05
    ours = {name: float(answers[name].mean()) for name in ("kivi-4", "kivi")}
    evidence = "; ".join(f"{name}: {x:.0%}" for name, x in ours.items())
    return Finding(
        shares(answers), min(ours.values()) >= least, f"{variant}: {evidence} (least {least:.0%})"
    )


def _throughput(lab: Lab) -> Finding:
    return throughput(lab, LLAMA_2_7B, "kivi:residual=32", tokens=161 + 338, rows=16, least=2.35)
