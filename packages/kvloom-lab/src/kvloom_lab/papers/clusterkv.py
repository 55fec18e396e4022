"""ClusterKV: LLM KV cache in semantic space for recallable compression (arXiv:2412.03213v2)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from kvloom.recipe import Recipe

from .claim import (
    ClaimTable,
    Finding,
    difference,
    ordered,
    quality_figures,
    require_retrieval,
    shares,
)
from .lab import Lab, named
from .recalling import PAPER_OPTIONS, shared_budgets
from .speed import EXACT, LLAMA_3_8B, OPT_6_7B, speedup, stated

COSINE, QUEST = "cosine, L/80", "Quest, pages of 16"
POINT = 0.01
Rates = Mapping[str, Mapping[int, float]]
"""Recall rate by index and budget in tokens."""


def _figures(rates: Rates, *names: str) -> ClaimTable:
    columns = [f"B = {budget}" for budget in rates[names[0]]]
    return ClaimTable(columns, {name: tuple(rates[name].values()) for name in names})


def _margins(rates: Rates, better: str, worse: str) -> list[float]:
    return [a - b for a, b in zip(rates[better].values(), rates[worse].values(), strict=True)]


def _points(margins: list[float]) -> str:
    return ", ".join(f"{100 * x:+.1f}" for x in margins)


def _recall(lab: Lab) -> Finding:
    rates = lab.recall()
    margins = _margins(rates, COSINE, QUEST)
    return Finding(
        _figures(rates, COSINE, QUEST),
        min(margins) >= 2 * POINT,
        f"clusters minus pages, points: {_points(margins)}",
    )


def _distance(lab: Lab) -> Finding:
    rates = lab.recall()
    others = ("L2, L/80", "inner product, L/80")
    margins = {name: _margins(rates, COSINE, name) for name in others}
    return Finding(
        _figures(rates, COSINE, *others),
        all(min(x) >= POINT for x in margins.values()),
        "; ".join(f"cosine minus {name}, points: {_points(x)}" for name, x in margins.items()),
    )


def _count(lab: Lab) -> Finding:
    rates = lab.recall()
    names = ("cosine, L/160", COSINE, "cosine, L/40", "cosine, L/20")
    means = [sum(rates[name].values()) / len(rates[name]) for name in names]
    gains = [b - a for a, b in pairwise(means)]
    return Finding(
        _figures(rates, *names),
        min(gains) > 0 and gains[0] > max(gains[1:]),
        f"gain of each doubling, points: {_points(gains)}",
    )


def _recipes(tokens: int) -> list[Recipe]:
    """Return the paper's three methods with a budget; every query head selects, as in the paper."""
    return [
        named(f"clusterkv:tokens={tokens},{PAPER_OPTIONS},query_heads=each", "ClusterKV"),
        named(f"quest:tokens={tokens},recent=0,query_heads=each", "Quest"),
        named(f"infinigen:tokens={tokens},recent=0,query_heads=each", "InfiniGen"),
    ]


def _language(lab: Lab) -> Finding:
    context = lab.long_context
    tokens = shared_budgets(context)[0]
    qualities = lab.quality(_recipes(tokens), context, samples=4)
    full = qualities["full"].perplexity
    off = {name: qualities[name].perplexity - full for name in ("ClusterKV", "Quest", "InfiniGen")}
    order = ordered(qualities, ("ClusterKV", "Quest"))
    return Finding(
        quality_figures(qualities),
        abs(off["ClusterKV"]) <= 0.5 and order.holds,
        "; ".join(f"perplexity of {name} minus full: {x:+.3f}" for name, x in off.items())
        + f"; {order.evidence}",
    )


def _answers(lab: Lab) -> Finding:
    context = lab.long_context
    tokens = shared_budgets(context)[2]
    answers = lab.needles(_recipes(tokens), "multikey", context)
    require_retrieval(answers)
    gap = difference(answers["Quest"], answers["ClusterKV"])
    return Finding(shares(answers), gap.high < 0, f"Quest minus ClusterKV: {gap}")


def _hits(lab: Lab) -> Finding:
    tokens = shared_budgets(lab.long_context)[0]
    rates = {
        r: lab.hits(f"clusterkv:tokens={tokens},{PAPER_OPTIONS},tier=host,steps={r}")
        for r in (1, 2)
    }
    rows = {f"R = {r}": (x,) for r, x in rates.items()}
    close = abs(rates[1] - 0.63) <= 0.1 and abs(rates[2] - 0.74) <= 0.1
    return Finding(
        ClaimTable(("hit rate",), rows),
        close and rates[2] > rates[1],
        f"R = 1: {rates[1]:.0%}, R = 2: {rates[2]:.0%} (budget {tokens})",
    )


def _speed(lab: Lab) -> Finding:
    names = [EXACT, "clusterkv", "quest"]
    rows, steps = {}, {}
    for tokens in (8192, 16_384, 32_768):
        steps = lab.steps(LLAMA_3_8B, names, tokens)
        rows[f"{tokens:,}"] = [speedup(steps, name) for name in names]
    return Finding(
        ClaimTable(("full", "ClusterKV", "Quest"), rows),
        speedup(steps, "clusterkv") >= 2 and speedup(steps, "clusterkv", "quest") >= 0.95,
        f"at 32k, {stated(steps, 'clusterkv')}; {stated(steps, 'clusterkv', 'quest')}",
    )


def _infinigen(lab: Lab) -> Finding:
    names = [EXACT, "clusterkv:tokens=256", "infinigen:tokens=256"]
    steps = lab.steps(OPT_6_7B, names, 2048)
    _, clusters, partial = names
    return Finding(
        ClaimTable(
            ("full", "ClusterKV", "InfiniGen"), {"2,048": [speedup(steps, x) for x in names]}
        ),
        speedup(steps, clusters, partial) >= 2.3,
        stated(steps, clusters, partial),
    )
