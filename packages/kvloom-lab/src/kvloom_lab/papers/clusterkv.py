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
    require_retrieval,
    shares,
)
from .lab import Lab, NotTestable, named
from .recalling import PAPER_OPTIONS, shared_budgets
from .speed import EXACT, LLAMA_3_8B, OPT_6_7B, speedup, stated

COSINE, QUEST = "cosine, L/80", "Quest, pages of 16"
INFINIGEN = "InfiniGen, 30% of the channels"
BUDGET = 1024  # of the paper, at every length
IMPORTANT = 256
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
    margins = {name: _margins(rates, COSINE, name) for name in (QUEST, INFINIGEN)}
    return Finding(
        _figures(rates, COSINE, QUEST, INFINIGEN),
        all(min(x) >= 2 * POINT for x in margins.values()),
        "; ".join(f"clusters minus {name}, points: {_points(x)}" for name, x in margins.items()),
    )


def _importance(lab: Lab) -> Finding:
    found = lab.importance(IMPORTANT)
    last = found.kept[-1]
    return Finding(
        ClaimTable(
            ("share",), {f"step {n}": (x,) for n, x in enumerate(found.kept, 1) if n & (n - 1) == 0}
        ),
        last <= 0.5,
        f"of the {IMPORTANT} most important tokens of the first step, {last:.0%} are among those "
        f"of step {len(found.kept)}",
    )


def _fragments(lab: Lab) -> Finding:
    in_page = lab.importance(IMPORTANT).in_page
    return Finding(
        ClaimTable(("important tokens in a page",), {"pages with any": (in_page,)}),
        in_page <= 2,
        f"a page of 16 tokens with any of the {IMPORTANT} holds {in_page:.2f} of them",
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
    names = ("ClusterKV", "Quest", "InfiniGen")
    rows: dict[str, list[float]] = {name: [] for name in names}
    contexts = {lab.context, min(2 * lab.context, lab.long_context), lab.long_context}
    lengths = sorted(n for n in contexts if n > BUDGET)
    _require_recall(lab)
    for context in lengths:
        qualities = lab.quality(_recipes(BUDGET), context, samples=6)
        for name in names:
            rows[name].append(qualities[name].perplexity - qualities["full"].perplexity)
    order = ordered(qualities, ("ClusterKV", "Quest"), ("ClusterKV", "InfiniGen"))
    far = max(abs(x) for x in rows["ClusterKV"])
    return Finding(
        ClaimTable([f"{n:,} tokens" for n in lengths], rows),
        far <= 0.5 and order.holds,
        f"perplexity of ClusterKV is at most {far:.3f} from full; {order.evidence}",
    )


def _answers(lab: Lab) -> Finding:
    context = lab.long_context
    tokens = shared_budgets(context)[2]
    answers = lab.needles(_recipes(tokens), "multikey", context)
    require_retrieval(answers)
    gaps = {x: difference(answers[x], answers["ClusterKV"]) for x in ("Quest", "InfiniGen")}
    return Finding(
        shares(answers),
        all(gap.high < 0 for gap in gaps.values()),
        "; ".join(f"{name} minus ClusterKV: {gap}" for name, gap in gaps.items()),
    )


def _require_recall(lab: Lab) -> None:
    if lab.long_context <= BUDGET:
        raise NotTestable(f"the model's positions leave no tokens out of a budget of {BUDGET:,}")


def _hits(lab: Lab) -> Finding:
    _require_recall(lab)
    options = f"tokens={BUDGET},{PAPER_OPTIONS},query_heads=each,tier=host"
    rates = {r: lab.hits(f"clusterkv:{options},steps={r}") for r in (1, 2)}
    rows = {f"R = {r}": (x,) for r, x in rates.items()}
    close = abs(rates[1] - 0.63) <= 0.1 and abs(rates[2] - 0.74) <= 0.1
    return Finding(
        ClaimTable(("hit rate",), rows),
        close and rates[2] > rates[1],
        f"R = 1: {rates[1]:.0%}, R = 2: {rates[2]:.0%} (budget {BUDGET:,})",
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
