"""What `kvloom papers` prints of a claim, and its verdicts as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from ..show.tables import FigureTable
from .claim import STYLES, ClaimTable, Verdict


def verdict_block(verdict: Verdict, model: str) -> Group:
    """Return a claim, the paper's figures, ours, and the verdict."""
    claim = verdict.claim
    heading = Text.assemble((f"{claim.name}: ", "bold"), claim.text)
    parts: list[Any] = [heading, Text(claim.where, "dim")]
    if claim.paper is not None:
        parts.append(_claim_table("the paper", claim.paper))
    if verdict.ours is not None:
        parts.append(_claim_table(model, verdict.ours))
    if claim.rule and verdict.ours is not None:
        parts.append(Text(f"rule: {claim.rule}", "dim"))
    if verdict.evidence:
        parts.append(Text(f"measured: {verdict.evidence}"))
    parts.append(Text(f"{verdict.status}{_because(verdict)}", STYLES[verdict.status]))
    return Group(*parts, Text())


def verdict_line(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    return f"{verdict.claim.name}: {verdict.status}{_because(verdict)}"


def verdict_summary(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims have each status."""
    counts = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{counts[status]} {status}" for status in STYLES if counts[status])


def verdict_data(
    paper: str, verdicts: Sequence[Verdict], environment: dict[str, Any]
) -> dict[str, Any]:
    """Return the verdicts as plain data."""
    claims = [
        {
            "name": v.claim.name,
            "claim": v.claim.text,
            "where": v.claim.where,
            "rule": v.claim.rule,
            "status": v.status,
            "paper": v.claim.paper and asdict(v.claim.paper),
            "ours": v.ours and asdict(v.ours),
            "evidence": v.evidence,
            "reason": v.explanation,
        }
        for v in verdicts
    ]
    return {"environment": environment, "paper": paper, "claims": claims}


def _because(verdict: Verdict) -> str:
    return f": {verdict.explanation}" if verdict.explanation else ""


def _claim_table(title: str, figures: ClaimTable) -> FigureTable:
    table = FigureTable(title, "", tuple(figures.columns))
    for name, cells in figures.rows.items():
        table.add(name, *(_claim_cell(x) for x in cells))
    return table


def _claim_cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2g}"
