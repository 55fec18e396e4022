"""Verdicts as text for a terminal, and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .claim import FAILED, NOT_REPRODUCED, NOT_TESTABLE, REPRODUCED, ClaimTable, Verdict

_STYLE = {REPRODUCED: "green", NOT_REPRODUCED: "red", NOT_TESTABLE: "dim", FAILED: "yellow"}


def block(verdict: Verdict, model: str) -> Group:
    """Return a claim, the paper's figures beside ours, and the verdict; rich can print it."""
    claim = verdict.claim
    heading = Text.assemble((f"{claim.name}: ", "bold"), claim.text)
    parts: list[Any] = [heading, Text(claim.where, "dim")]
    if claim.paper is not None:
        parts.append(_table("the paper", claim.paper))
    if verdict.ours is not None:
        parts.append(_table(model, verdict.ours))
    if claim.rule and verdict.ours is not None:
        parts.append(Text(f"rule: {claim.rule}", "dim"))
    if verdict.evidence:
        parts.append(Text(f"measured: {verdict.evidence}"))
    parts.append(Text(f"{verdict.status}{_because(verdict)}", _STYLE[verdict.status]))
    return Group(*parts, Text())


def line(verdict: Verdict) -> str:
    """Return a verdict in one line."""
    return f"{verdict.claim.name}: {verdict.status}{_because(verdict)}"


def summary(verdicts: Sequence[Verdict]) -> str:
    """Return how many claims have each status."""
    found = Counter(verdict.status for verdict in verdicts)
    return ", ".join(f"{found[status]} {status}" for status in _STYLE if found[status])


def to_data(paper: str, verdicts: Sequence[Verdict], environment: dict[str, Any]) -> dict[str, Any]:
    """Return the verdicts as plain data."""
    claims = [
        {
            "name": v.claim.name,
            "claim": v.claim.text,
            "where": v.claim.where,
            "rule": v.claim.rule,
            "status": v.status,
            "paper": _plain(v.claim.paper),
            "ours": _plain(v.ours),
            "evidence": v.evidence,
            "reason": v.explanation,
        }
        for v in verdicts
    ]
    return {"environment": environment, "paper": paper, "claims": claims}


def _because(verdict: Verdict) -> str:
    return f": {verdict.explanation}" if verdict.explanation else ""


def _table(title: str, figures: ClaimTable) -> FigureTable:
    built = FigureTable(title, "", tuple(figures.columns))
    for name, cells in figures.rows.items():
        built.add(name, *(_cell(x) for x in cells))
    return built


def _cell(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.001 or value == 0 else f"{value:.2g}"


def _plain(figures: ClaimTable | None) -> dict[str, Any] | None:
    if figures is None:
        return None
    return {
        "columns": list(figures.columns),
        "rows": {name: list(cells) for name, cells in figures.rows.items()},
    }
