"""The tables of `kvloom bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..planner.units import show_bytes
from ..show.tables import FigureTable, device_text, missing_text
from .throughput import Measured, ThroughputRow
from .timing import TimedRow


def bench_table(
    rows: Sequence[TimedRow],
    environment: dict[str, Any],
    limits: dict[str, Any],
    caption: str,
    shares: bool = False,
) -> FigureTable:
    """Return a table of the rows, by context.

    shares: show the share of a reference's time that a row takes, instead of how many times faster
    the row is.
    """
    bandwidth = limits["read_gb_s"]
    references = list(dict.fromkeys(name for row in rows for name in row.ratios))
    title = (
        f"{environment['shape']}, {environment['dtype']}, batch {environment['batch']}; "
        f"{device_text(environment)}"
    )
    speeds = any(row.gb_s is not None for row in rows)
    names = ["ms", *(_heading(name, shares) for name in references), "KV\nMiB"]
    table = FigureTable(title, "", names + ["GB/s", "of the\nlimit"] * speeds)
    for context in dict.fromkeys(row.context for row in rows):
        table.section(f"{context:,} tokens")
        for row in (row for row in rows if row.context == context):
            mark = "*" if row.fell else ""
            table.add(row.name + mark, *_bench_cells(row, references, shares, speeds, bandwidth))
    last = {row.name: row for row in rows}.values()
    problems = [f"{row.name}: {row.problem}" for row in last if row.problem]
    problems += [
        f"* {row.name}: plain torch runs {'; '.join(row.fell)}" for row in last if row.fell
    ]
    compiled = f" Compiling kernels took {environment['compile_s']:.1f} s, not timed."
    limit = f" The machine reads at most {bandwidth:.1f} GB/s." if speeds else ""
    caption += limit + compiled * (environment["compile_s"] >= 0.05)
    return table.captioned(caption, *problems, *missing_text(environment))


def bench_line(row: TimedRow) -> str:
    """Return the time of a row and its bytes in one line."""
    name = f"{row.context:,} tokens, {row.name}: "
    if row.ms is None:
        return name + (row.problem or "no times")
    size = "" if row.kv_bytes is None else f", {row.kv_bytes / 2**20:,.1f} MiB"
    return f"{name}{row.ms:,.2f} ms{size}"


def _bench_cells(
    row: TimedRow, references: Sequence[str], shares: bool, speeds: bool, bandwidth: float
) -> list[str]:
    if row.ms is None:
        return ["–"]
    times = (row.ratios.get(name) for name in references)
    ratios = ("–" if x is None else f"{1 / x:.1%}" if shares else f"{x:.2f}x" for x in times)
    size = "–" if row.kv_bytes is None else f"{row.kv_bytes / 2**20:,.1f}"
    cells = [f"{row.ms:,.2f}", *ratios, size]
    if speeds:
        cells += (
            ["–", "–"] if row.gb_s is None else [f"{row.gb_s:.1f}", f"{row.gb_s / bandwidth:.0%}"]
        )
    return cells


def _heading(name: str, shares: bool) -> str:
    """Return the heading of a reference's column, with a long name on two lines."""
    head, _, rest = name.rpartition(" ")
    name = f"{head}\n{rest}" if head else name
    return f"it /\n{name}" if shares else f"{name}\n/ it"


_THROUGHPUT_COLUMNS = (
    "requests", "KV\nMiB", "MiB of\none", "planned", "peak\nMiB", "tok/s", "tok/s,\nrange",
    "tok/s,\nprocessor", "DynamicCache\n/ it", "tok/s with\nprompts", "first\ntoken, s",
    "pre-\nempted", "KL",
)  # fmt: skip


def throughput_table(rows: Sequence[ThroughputRow], environment: dict[str, Any]) -> FigureTable:
    """Return a table of the rows, by size of requests."""
    memory, rounds = show_bytes(environment["memory"]), max(row.rounds for row in rows)
    title = (
        f"{environment['model']} ({environment['dtype']}), {memory} of caches; "
        f"{device_text(environment)}"
    )
    table = FigureTable(title, "", _THROUGHPUT_COLUMNS)
    for size in dict.fromkeys((row.prompt, row.new) for row in rows):
        table.section(f"{size[0]:,} tokens and {size[1]:,} new")
        for row in (row for row in rows if (row.prompt, row.new) == size):
            table.add(row.name, *_throughput_cells(row))
    problems = list(dict.fromkeys(f"{row.name}: {row.problem}" for row in rows if row.problem))
    problems += [
        f"{row.name}: {row.kv_bytes:,} bytes, above the {environment['memory']:,} that were given"
        for row in rows
        if row.kv_bytes and row.kv_bytes > environment["memory"]
    ]
    caption = (
        f"Medians of up to {rounds} rounds. tok/s: output tokens while all requests decode; "
        "processor: the same per second of processor time, which DynamicCache / it compares; with "
        "prompts: per second of processor time, everything included. peak: the most memory of the "
        "process above the model's. KL: nats from exact attention."
    )
    return table.captioned(caption, *problems, *missing_text(environment))


def _throughput_cells(row: ThroughputRow) -> list[str]:
    requests = "–" if row.batch is None else f"{row.batch:,}"
    if row.tokens_s is None or row.processor_tokens_s is None:
        return [requests]
    whole = row.whole_processor_tokens_s
    assert whole and row.kv_bytes and row.predicted_bytes and row.batch  # noqa: PT018
    return [
        requests,
        f"{row.kv_bytes / 2**20:,.1f}",
        f"{row.kv_bytes / row.batch / 2**20:,.2f}",
        f"{row.predicted_bytes / 2**20:,.2f}",
        "–" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.0f}",
        f"{row.tokens_s.best:,.1f}",
        f"{row.tokens_s.low:,.0f}–{row.tokens_s.high:,.0f}",
        f"{row.processor_tokens_s.best:,.1f}",
        "–" if row.times_dynamic is None else f"{row.times_dynamic:.2f}x",
        f"{whole.best:,.1f}",
        f"{row.first_token_s:,.1f}",
        "" if row.preemptions is None else str(row.preemptions),
        "–" if row.kl is None else f"{row.kl:.2g}",
    ]


def throughput_line(measured: Measured) -> str:
    """Return a run in one line."""
    job, run = measured
    if isinstance(run, str):
        return f"{job}: {run}"
    wall, processor = (run.decoded / s if s > 0 else 0 for s in run.decode_s)
    return (
        f"{job}: {run.batch} requests, {wall:,.1f} tok/s, {processor:,.1f} per processor second, "
        f"{run.kv_bytes / 2**20:,.1f} MiB"
    )
