"""A comparison as a table, and a finished row as one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ...report.table import FigureTable
from .rows import Row

_COLUMNS = (
    "bits per\nvalue", "KV\nMiB", "times\nsmaller", "prefill\ns", "decode\ntok/s", "perplexity",
    "agrees", "needles\ncorrect",
)  # fmt: skip


def table(rows: Sequence[Row], environment: dict[str, Any]) -> Group:
    """Return a table of the rows with a caption on how they were measured; rich can print it."""
    e = environment
    built = FigureTable(f"{e['model']} ({e['dtype']}), {_device(e)}", "recipe", _COLUMNS)
    for row in rows:
        built.add(row.recipe, *_cells(row, e["questions"]))
    problems = [Text(_problem(r), "yellow") for r in rows if r.problem]
    reads = [f"{r.recipe} {r.tokens_read:,.0f}" for r in rows if r.tokens_read is not None]
    recalled = [Text("tokens read per step and layer: " + ", ".join(reads))] if reads else []
    moved = [
        f"{r.recipe} {r.moved_bytes / 2**20:,.2f} MiB "
        f"({r.ready:.0%} of its tokens were on the device)"
        for r in rows
        if r.moved_bytes is not None and r.ready is not None
    ]
    if moved:
        recalled.append(Text("copied from a tier per step, all rows: " + ", ".join(moved)))
    budget = [Text(_budget(e), "dim")] if "budget" in e else []
    missing = [Text(f"not measured: {', '.join(e['missing'])}", "yellow")] if "missing" in e else []
    return Group(built, *recalled, *problems, *missing, *budget, Text(_caption(e), "dim"))


def line(row: Row, environment: dict[str, Any]) -> str:
    """Return the figures of a row in one line."""
    if row.problem is not None:
        return _problem(row)
    bits, _, smaller, prefill, speed, perplexity, agrees, needles = _cells(
        row, environment["questions"]
    )
    return (
        f"{row.recipe}: {bits} bits per value, {smaller} smaller, prefill {prefill} s, "
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
        f"{rows} of {e['context']:,} tokens of {e['text'] or 'text'}, then {e['new_tokens']} "
        "tokens one by one. bits, MiB: at the end, with exact windows, metadata and spare room; "
        "tok/s: all rows together; agrees: the likeliest next token is that of full."
    )


def _budget(e: dict[str, Any]) -> str:
    budget, without = e["budget"], e["without_budget"]
    tokens = f"{budget:,} tokens" if isinstance(budget, int) else f"{budget:.4g} of the context"
    return (
        f"budget: {tokens}, to keep, or to read per step for recipes with recall; "
        f"without a budget: {', '.join(without)}."
    )


def _device(e: dict[str, Any]) -> str:
    threads = "1 thread" if e["threads"] == 1 else f"{e['threads']} threads"
    return e["gpu"] or f"{e['cpu']}, {threads}"
