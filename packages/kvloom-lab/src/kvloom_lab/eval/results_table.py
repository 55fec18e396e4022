"""The results of an evaluation as a table: for each task, the recipes, their bytes and scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .summary import Figures, Interval, summarize


def results_table(lines: Iterable[Mapping[str, Any]]) -> Group:
    """Return a table for each task; rich can print it. lines: of `TASK.jsonl`."""
    by_task: dict[str, list[Figures]] = {}
    for figures in summarize(lines):
        by_task.setdefault(figures.task, []).append(figures)
    parts: list[Any] = []
    for task, rows in by_task.items():
        names = list(dict.fromkeys(name for row in rows for name in row.scores))
        columns = ["share of\nbytes", *(name.replace("_", "\n") for name in names), "samples"]
        table = FigureTable(task, "recipe", columns)
        for row in rows:
            if row.scores:
                cells = [_cell(row.scores.get(name)) for name in names]
                table.add(row.recipe, f"{row.share:.1%}", *cells, str(row.samples))
        parts.append(table)
        parts += [
            Text(f"{row.recipe}: {row.problem} ({row.problems} samples)", "yellow")
            for row in rows
            if row.problem
        ]
    parts.append(Text("Means; the 95% intervals are on the page of kvloom report.", "dim"))
    return Group(*parts)


def _cell(interval: Interval | None) -> str:
    return "–" if interval is None else f"{interval.mean:.4g}"
