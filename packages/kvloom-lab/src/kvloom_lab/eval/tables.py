"""The tables of `kvloom eval` and `kvloom compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.text import Text

from ..show.tables import FigureTable, device_text, missing_text
from .comparison import Row
from .summary import PER_SAMPLE, Figures, main_score, summarize


def results_table(
    lines: Iterable[Mapping[str, Any]], prompts: Iterable[Mapping[str, Any]] = ()
) -> Group:
    """Return a table for each task.

    lines: of `TASK.jsonl`. prompts: of `prompts.jsonl`. A task whose contexts differ in length has
    a table of each length.
    """
    lengths = {(x["task"], x["sample"]): x["length"] for x in prompts if "length" in x}
    different = {(task, length) for (task, _), length in lengths.items()}
    by_length = Counter(task for task, _ in different)
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        title, length = line["task"], lengths.get((line["task"], line["sample"]))
        if length is not None and by_length[title] > 1:
            title += f", context {length:,}"
        groups.setdefault(title, []).append(line)
    tables: list[FigureTable] = []
    for title, group in groups.items():
        rows = summarize(group)
        names = list(dict.fromkeys(name for row in rows for name in row.scores))
        headings = (name.replace("_", "\n") for name in names)
        columns = ["share of\nbytes", "KV\nMiB", *headings, "samples", "against\nfull"]
        table = FigureTable(title, "recipe", columns)
        for row in rows:
            if row.scores:
                means = {name: f"{interval.mean:.4g}" for name, interval in row.scores.items()}
                cells = [means.get(name, "–") for name in names]
                size = f"{(row.kv_bytes or 0) / 2**20:,.2f}"
                score = main_score(row.task, names)
                main = row.over_full.get(PER_SAMPLE.get(score, score))
                verdict = "–" if main is None else f"{main.verdict} +{main.won} −{main.lost}"
                table.add(row.recipe, f"{row.share:.1%}", size, *cells, str(row.samples), verdict)
        problems = [f"{x.recipe}: {x.problem} ({x.problems} samples)" for x in rows if x.problem]
        table.note(*_tokens_read(rows))
        table.note(*problems, style="yellow")
        tables.append(table)
    caption = (
        "Means; the 95% intervals are on the page of kvloom report. Against full: whether the "
        "first score differs by more than chance, and the samples that are +better and −worse."
    )
    return Group(*tables, Text(caption, "dim"))


def _tokens_read(rows: Sequence[Row | Figures]) -> list[str]:
    """Return a line with the tokens that recipes with recall read, if there are any."""
    reads = [f"{r.recipe} {r.tokens_read:,.0f}" for r in rows if r.tokens_read is not None]
    return ["tokens read per step and layer: " + ", ".join(reads)] if reads else []


_COMPARISON_COLUMNS = (
    "bits per\nvalue", "KV\nMiB", "times\nsmaller", "prefill\ns", "decode\ntok/s", "perplexity",
    "agrees", "needles\ncorrect",
)  # fmt: skip


def comparison_table(rows: Sequence[Row], environment: dict[str, Any]) -> FigureTable:
    """Return a table of the rows with a caption on how they were measured."""
    title = f"{environment['model']} ({environment['dtype']}), {device_text(environment)}"
    table = FigureTable(title, "recipe", _COMPARISON_COLUMNS)
    for row in rows:
        table.add(row.recipe, *_comparison_cells(row, environment["questions"]))
    moved = [
        f"{r.recipe} {r.moved_bytes / 2**20:,.2f} MiB "
        f"({r.ready:.0%} of its tokens were on the device)"
        for r in rows
        if r.moved_bytes is not None and r.ready is not None
    ]
    table.note(*_tokens_read(rows))
    if moved:
        table.note("copied from a tier per step, all rows: " + ", ".join(moved))
    problems = [_comparison_problem(row) for row in rows if row.problem]
    table.note(*problems, *missing_text(environment), style="yellow")
    if (budget := environment.get("budget")) is not None:
        tokens = f"{budget:,} tokens" if isinstance(budget, int) else f"{budget:.4g} of the context"
        text = f"budget: {tokens}, to keep, or to read per step for recipes with recall; "
        table.note(
            f"{text}without a budget: {', '.join(environment['without_budget'])}.", style="dim"
        )
    batch, context = environment["batch"], environment["context"]
    return table.captioned(
        f"{batch} row{'s' * (batch != 1)} of {context:,} tokens of {environment['text'] or 'text'}"
        f", then {environment['new_tokens']} tokens one by one. bits, MiB: at the end, with exact "
        "windows, metadata and spare room; tok/s: all rows together; agrees: the likeliest next "
        "token is that of full."
    )


def comparison_line(row: Row, environment: dict[str, Any]) -> str:
    """Return the figures of a row in one line."""
    if row.problem is not None:
        return _comparison_problem(row)
    bits, _, smaller, prefill, speed, perplexity, agrees, needles = _comparison_cells(
        row, environment["questions"]
    )
    return (
        f"{row.recipe}: {bits} bits per value, {smaller} smaller, prefill {prefill} s, "
        f"{speed} tok/s, perplexity {perplexity}, agrees {agrees}"
        + (f", needles {needles}" if row.needle is not None else "")
    )


def _comparison_problem(row: Row) -> str:
    return f"{row.recipe} {'failed' if row.failed else 'cannot run'}: {row.problem}"


def _comparison_cells(row: Row, questions: int) -> list[str]:
    if row.problem is not None:
        return ["–"] * len(_COMPARISON_COLUMNS)
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
