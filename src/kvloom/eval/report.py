"""Rows as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.sheet import Sheet
from .measure import Row

_COLUMNS = (
    "bits a\nvalue", "KV\nMiB", "times\nsmaller", "prefill\ns", "decode\ntok/s", "perplexity",
    "agrees", "needles\nright",
)  # fmt: skip


def table(rows: Sequence[Row], environment: dict[str, Any]) -> Group:
    """Return a table of the rows, and below it what they were measured on; rich prints it."""
    e = environment
    built = Sheet(f"{e['model']} ({e['dtype']}), {_device(e)}", "recipe", _COLUMNS)
    for row in rows:
        built.add(row.recipe, *_cells(row, e["questions"]))
    problems = [Text(_problem(r), "yellow") for r in rows if r.problem]
    reads = [f"{r.recipe} {r.tokens_read:,.0f}" for r in rows if r.tokens_read is not None]
    recalled = [Text("tokens that a step reads, a layer: " + ", ".join(reads))] if reads else []
    moved = [
        f"{r.recipe} {r.moved_bytes / 2**20:,.2f} MiB ({r.ready:.0%} of the tokens lay ready)"
        for r in rows
        if r.moved_bytes is not None and r.ready is not None
    ]
    if moved:
        recalled.append(Text("copied from a tier a step, all rows: " + ", ".join(moved)))
    budget = [Text(_budget(e), "dim")] if "budget" in e else []
    missing = [Text(f"not measured: {', '.join(e['missing'])}", "yellow")] if "missing" in e else []
    return Group(built, *recalled, *problems, *missing, *budget, Text(_caption(e), "dim"))


def to_json(rows: Sequence[Row], environment: dict[str, Any]) -> str:
    """Return `{"environment": …, "rows": […]}`; figures that do not exist are null."""
    plain = [{k: _finite(v) for k, v in asdict(row).items()} for row in rows]
    return json.dumps({"environment": environment, "rows": plain}, indent=2, ensure_ascii=False)


def line(row: Row, environment: dict[str, Any]) -> str:
    """Return the figures of a row in one line."""
    if row.problem is not None:
        return _problem(row)
    bits, _, smaller, prefill, speed, perplexity, agrees, needles = _cells(
        row, environment["questions"]
    )
    return (
        f"{row.recipe}: {bits} bits a value, {smaller} smaller, prefill {prefill} s, "
        f"{speed} tok/s, perplexity {perplexity}, agrees {agrees}"
        + (f", needles {needles}" if row.needle is not None else "")
    )


def _problem(row: Row) -> str:
    return f"{row.recipe} {'failed' if row.failed else 'cannot run'}: {row.problem}"


def _cells(row: Row, questions: int) -> list[str]:
    if row.problem is not None:
        return ["–"] * len(_COLUMNS)
    assert row.kv_bytes is not None
    needles = "–" if row.needle is None else f"{round(row.needle * questions)}/{questions}"
    return [
        "–" if row.bits_per_value is None else f"{row.bits_per_value:.2f}",
        f"{row.kv_bytes / 2**20:,.2f}",
        f"{row.times_smaller:.1f}x",
        f"{row.prefill_s:.2f}",
        f"{row.decode_tokens_s:,.1f}",
        f"{row.perplexity:,.3f}" if (row.perplexity or 0) < 1000 else f"{row.perplexity:,.0f}",
        f"{row.agreement:.1%}",
        needles,
    ]


def _caption(e: dict[str, Any]) -> str:
    rows = "1 row" if e["batch"] == 1 else f"{e['batch']} rows"
    return (
        f"{rows} of {e['context']:,} tokens of {e['text'] or 'text'}, {e['new_tokens']} more fed "
        "one by one. bits, MiB: held at the end, exact windows, metadata and spare room included; "
        "tok/s: all rows together; agrees: the likeliest next token is that of full."
    )


def _budget(e: dict[str, Any]) -> str:
    budget, without = e["budget"], e["without_budget"]
    tokens = f"{budget:,} tokens" if isinstance(budget, int) else f"{budget:.4g} of the context"
    return (
        f"budget: {tokens}, kept, or read at a step by recipes that recall; "
        f"without one: {', '.join(without)}."
    )


def _device(e: dict[str, Any]) -> str:
    threads = "1 thread" if e["threads"] == 1 else f"{e['threads']} threads"
    return e["gpu"] or f"{e['cpu']}, {threads}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
