"""Rows as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..report.sheet import Sheet
from .rows import Row


def table(
    rows: Sequence[Row],
    environment: dict[str, Any],
    limits: dict[str, Any],
    about: str,
    shares: bool = False,
) -> Group:
    """Return a table of the rows, by context; rich prints it. about: the caption.

    shares: say which share of another's time a side takes, instead of how many times faster it is.
    """
    e, most = environment, limits["read_gb_s"]
    against = list(dict.fromkeys(name for row in rows for name in row.ratios))
    threads = "1 thread" if e["threads"] == 1 else f"{e['threads']} threads"
    title = f"{e['shape']}, {e['dtype']}, batch {e['batch']}; {e['cpu']}, {threads}"
    speeds = any(row.gb_s is not None for row in rows)
    names = ["ms", *(_wrapped(name, shares) for name in against), "KV\nMiB"]
    built = Sheet(title, "", names + ["GB/s", "of the\nlimit"] * speeds)
    for context in dict.fromkeys(row.context for row in rows):
        built.part(f"{context:,} tokens")
        for row in (row for row in rows if row.context == context):
            mark = "*" if row.fell else ""
            built.add(row.name + mark, *_cells(row, against, shares, speeds, most))
    notes = [Text(f"{r.name}: {r.problem}", "yellow") for r in _once(rows) if r.problem]
    fell = [f"* {r.name}: plain torch runs {'; '.join(r.fell)}" for r in _once(rows) if r.fell]
    notes += [Text(why, "yellow") for why in fell]
    compiled = f" Kernels were ready after {e['compile_s']:.1f} s, not timed."
    limit = f" The machine reads {most:.1f} GB/s at most." if speeds else ""
    if "missing" in e:
        notes.append(Text(f"not measured: {', '.join(e['missing'])}", "yellow"))
    return Group(built, *notes, Text(about + limit + compiled * (e["compile_s"] >= 0.05), "dim"))


def line(row: Row) -> str:
    """Return the time of a row, and what it holds, in one line."""
    at = f"{row.context:,} tokens, {row.name}: "
    if row.ms is None:
        return at + (row.problem or "no times")
    held = "" if row.kv_bytes is None else f", {row.kv_bytes / 2**20:,.1f} MiB"
    return f"{at}{row.ms:,.2f} ms{held}"


def _cells(row: Row, against: Sequence[str], shares: bool, speeds: bool, most: float) -> list[str]:
    if row.ms is None:
        return ["–"]
    ratios = (
        "–" if name not in row.ratios else _ratio(row.ratios[name], shares) for name in against
    )
    held = "–" if row.kv_bytes is None else f"{row.kv_bytes / 2**20:,.1f}"
    cells = [f"{row.ms:,.2f}", *ratios, held]
    if speeds:
        cells += ["–", "–"] if row.gb_s is None else [f"{row.gb_s:.1f}", f"{row.gb_s / most:.0%}"]
    return cells


def _once(rows: Sequence[Row]) -> list[Row]:
    return list({row.name: row for row in rows}.values())


def _ratio(ratio: float, share: bool) -> str:
    return f"{1 / ratio:.1%}" if share else f"{ratio:.2f}x"


def _wrapped(name: str, shares: bool) -> str:
    """A column's heading, a long name over two lines."""
    head, _, rest = name.rpartition(" ")
    name = f"{head}\n{rest}" if head else name
    return f"it /\n{name}" if shares else f"{name}\n/ it"
