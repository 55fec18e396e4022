"""Results of a benchmark as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.table import FigureTable
from .rows import Row


def table(
    rows: Sequence[Row],
    environment: dict[str, Any],
    limits: dict[str, Any],
    caption: str,
    shares: bool = False,
) -> Group:
    """Return a table of the rows, by context; rich can print it.

    shares: show the share of a baseline's time that a row takes, instead of how many times faster
    the row is.
    """
    e, bandwidth = environment, limits["read_gb_s"]
    baselines = list(dict.fromkeys(name for row in rows for name in row.ratios))
    threads = "1 thread" if e["threads"] == 1 else f"{e['threads']} threads"
    title = f"{e['shape']}, {e['dtype']}, batch {e['batch']}; {e['cpu']}, {threads}"
    speeds = any(row.gb_s is not None for row in rows)
    names = ["ms", *(_heading(name, shares) for name in baselines), "KV\nMiB"]
    built = FigureTable(title, "", names + ["GB/s", "of the\nlimit"] * speeds)
    for context in dict.fromkeys(row.context for row in rows):
        built.section(f"{context:,} tokens")
        for row in (row for row in rows if row.context == context):
            mark = "*" if row.fell else ""
            built.add(row.name + mark, *_cells(row, baselines, shares, speeds, bandwidth))
    notes = [Text(f"{r.name}: {r.problem}", "yellow") for r in _once(rows) if r.problem]
    fallbacks = [f"* {r.name}: plain torch runs {'; '.join(r.fell)}" for r in _once(rows) if r.fell]
    notes += [Text(line, "yellow") for line in fallbacks]
    compiled = f" Compiling kernels took {e['compile_s']:.1f} s, not timed."
    limit = f" The machine reads at most {bandwidth:.1f} GB/s." if speeds else ""
    if "missing" in e:
        notes.append(Text(f"not measured: {', '.join(e['missing'])}", "yellow"))
    return Group(built, *notes, Text(caption + limit + compiled * (e["compile_s"] >= 0.05), "dim"))


def line(row: Row) -> str:
    """Return the time of a row and its bytes in one line."""
    at = f"{row.context:,} tokens, {row.name}: "
    if row.ms is None:
        return at + (row.problem or "no times")
    size = "" if row.kv_bytes is None else f", {row.kv_bytes / 2**20:,.1f} MiB"
    return f"{at}{row.ms:,.2f} ms{size}"


def _cells(
    row: Row, baselines: Sequence[str], shares: bool, speeds: bool, bandwidth: float
) -> list[str]:
    if row.ms is None:
        return ["–"]
    ratios = (
        "–" if name not in row.ratios else _ratio(row.ratios[name], shares) for name in baselines
    )
    size = "–" if row.kv_bytes is None else f"{row.kv_bytes / 2**20:,.1f}"
    cells = [f"{row.ms:,.2f}", *ratios, size]
    if speeds:
        cells += (
            ["–", "–"] if row.gb_s is None else [f"{row.gb_s:.1f}", f"{row.gb_s / bandwidth:.0%}"]
        )
    return cells


def _once(rows: Sequence[Row]) -> list[Row]:
    """Return the last row of each name."""
    return list({row.name: row for row in rows}.values())


def _ratio(ratio: float, share: bool) -> str:
    return f"{1 / ratio:.1%}" if share else f"{ratio:.2f}x"


def _heading(name: str, shares: bool) -> str:
    """Return the heading of a baseline's column, with a long name on two lines."""
    head, _, rest = name.rpartition(" ")
    name = f"{head}\n{rest}" if head else name
    return f"it /\n{name}" if shares else f"{name}\n/ it"
