"""The two pages: `kvloom inspect` and `kvloom report` write one HTML file each.

Data are inserted so that no text can end their element. The page of results contains a summary that
it always reads, without the text of any sample, and the texts of a task in packed chunks of
consecutive samples, which the page unpacks when a reader opens one of them.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import pairwise
from typing import Any

import numpy as np

from kvloom import __version__

from ..eval.results import RunResults
from ..eval.summary import (
    EXACT,
    PER_SAMPLE,
    Figures,
    Interval,
    higher_is_better,
    main_score,
    pareto,
    task_class,
)
from ..workload.files import finite


def html_page(name: str, title: str, scripts: Sequence[str], data: Any, more: str = "") -> str:
    """Return one HTML file; it needs no network and no other file.

    `page.html`, `page.css` and `page.js` in `assets` are the base of every page; `name`.html and
    .css are added to them. No text in the data can end the script element that contains it, nor
    start another. Raises `ValueError` for NaN and infinity.

    name: of the page's files. scripts: their names, in order. data: plain data for the script
    element `data`. more: elements after that one.
    """

    def read(file: str) -> str:
        return (files(__package__) / "assets" / file).read_text(encoding="utf-8")

    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    html = read("page.html")
    for placeholder, part in (
        ("@TITLE@", title),
        ("@STYLE@", read("page.css") + read(f"{name}.css")),
        ("@BODY@", read(f"{name}.html")),
        ("@MORE@", more),
        ("@SCRIPT@", "\n".join(read(f"{script}.js") for script in ("page", *scripts))),
        ("@DATA@", text.replace("<", "\\u003c")),  # last: it may contain any text
    ):
        html = html.replace(placeholder, part, 1)
    return html


def inspect_page(data: dict[str, Any]) -> str:
    """Return the page for the data of `trace_recipe`; the keys model and source are shown too."""
    return html_page("inspect", "kvloom inspect", ["inspect"], data)


_RESULTS_SCRIPTS = ("base", "chart", "quality", "maps", "table", "samples", "main")


def results_page(summary: dict[str, Any], chunks: Sequence[str]) -> str:
    """Return the page for the summary and the chunks of `page_data`."""
    packed = "\n".join(
        f'<script type="text/plain" id="chunk{i}">{chunk}</script>'
        for i, chunk in enumerate(chunks)
    )
    scripts = [f"results-{name}" for name in _RESULTS_SCRIPTS]
    return html_page("results", "kvloom report", scripts, summary, f"{packed}\n")


CONTEXT_ENDS = 2000  # characters of a long context that the page shows from each end
_CHUNK = 400_000  # characters of JSON in a chunk
_CURVE_POINTS = 160
_PROMPT_FIELDS = {"task", "sample", "context", "question", "reference"}


def page_data(runs: Sequence[RunResults]) -> tuple[dict[str, Any], list[str]]:
    """Return the summary of all runs as plain data, and the chunks: base64 of gzipped JSON."""
    chunks: list[str] = []
    names = _unique([run.name for run in runs])
    summary = [
        {
            "name": name,
            "counts": run.counts,
            "model": run.model,
            "environment": run.environment,
            "settings": run.settings,
            "tasks": [_task(run, task, chunks) for task in _tasks(run)],
        }
        for name, run in zip(names, runs, strict=True)
    ]
    return {"kvloom": __version__, "exact": EXACT, "runs": finite(summary)}, chunks


def _tasks(run: RunResults) -> list[str]:
    """Return the tasks with at least one score, in the order of the settings."""
    tasks = list(dict.fromkeys(f.task for f in run.figures if f.scores))
    order_of_settings = run.settings.get("tasks")
    order = (
        {str(task).partition(":")[0]: i for i, task in enumerate(order_of_settings)}
        if isinstance(order_of_settings, list)
        else {}
    )
    return sorted(tasks, key=lambda task: order.get(task, len(order)))


def _task(run: RunResults, task: str, chunks: list[str]) -> dict[str, Any]:
    rows = [figures for figures in run.figures if figures.task == task]
    scores = list(dict.fromkeys(name for row in rows for name in row.scores))
    main = main_score(task, scores)
    prompts = run.prompts.get(task, {})
    lines = run.lines.get(task, {})
    samples = list(prompts)
    per_sample = PER_SAMPLE.get(main, main)
    plain = [_row(row) for row in rows]
    for row in plain:
        values = [
            (lines.get((sample, row["recipe"]), {}).get("scores") or {}).get(per_sample)
            for sample in samples
        ]
        row["values"] = [_short(value) for value in values]
        row["curves"] = _curves([lines.get((sample, row["recipe"])) for sample in samples])
    higher = {score: higher_is_better(task, score) for score in scores}
    fronts = {}
    for score in scores:
        found = [row.scores.get(score) for row in rows]
        most = max(interval.samples for interval in found if interval is not None)
        points = [  # a mean over fewer samples is no figure beside the others
            (row.share, interval.mean if interval and interval.samples == most else None)
            for row, interval in zip(rows, found, strict=True)
        ]
        fronts[score] = pareto(points, higher[score]) if run.counts == "bytes" else []
    return {
        "name": task,
        "about": task_class(task).about,
        "main": main,
        "per_sample": per_sample,
        "scores": {score: "higher" if higher[score] else "lower" for score in scores},
        "rows": plain,
        "fronts": fronts,
        "samples": samples,
        "fields": {
            name: [prompt.get(name) for prompt in prompts.values()]
            for name in ("length", "depth", "variant")
            if any(prompt.get(name) not in (None, "") for prompt in prompts.values())
        },
        "chunks": _pack(task, run, [row.recipe for row in rows], chunks),
    }


def _row(row: Figures) -> dict[str, Any]:
    """Return figures as plain data.

    An interval is [mean, low, high, samples]; a difference has [won, lost, verdict] after these.
    """

    def plain(interval: Interval) -> list[float | int | None]:
        ends = (interval.mean, interval.low, interval.high)
        return [*map(_short, ends), interval.samples]

    return {
        "recipe": row.recipe,
        "samples": row.samples,
        "problems": row.problems,
        "problem": row.problem,
        "share": _short(row.share),
        "kv_bytes": row.kv_bytes,
        "exact_bytes": row.exact_bytes,
        "bits_per_value": _short(row.bits_per_value),
        "tokens_read": _short(row.tokens_read),
        "scores": {name: plain(interval) for name, interval in row.scores.items()},
        "over_full": {
            name: [*plain(x), x.won, x.lost, x.verdict] for name, x in row.over_full.items()
        },
        "prefill_s": _short(row.prefill_s),
        "decode_tokens_s": _short(row.decode_tokens_s),
    }


def _curves(lines: Sequence[dict[str, Any] | None]) -> dict[str, list[list[float]]]:
    """Return each curve's mean over samples: [positions, means], in at most 160 steps.

    A position's mean is over the samples that reach it; it is the middle of a step of positions. A
    curve with fewer numbers than its line has tokens has one for each of as many equal blocks.
    """
    curves_by_name: dict[str, list[np.ndarray]] = {}
    for line in lines:
        tokens = len((line or {}).get("tokens") or ())
        for name, values in ((line or {}).get("curves") or {}).items():
            if len(values):
                positions = max(tokens, len(values))
                blocks = np.arange(positions) * len(values) // positions
                curves_by_name.setdefault(name, []).append(np.asarray(values, dtype=float)[blocks])
    means = {}
    for name, curves in curves_by_name.items():
        longest = max(map(len, curves))
        table = np.full((len(curves), longest), np.nan)
        for row, curve in zip(table, curves, strict=True):
            row[: len(curve)] = np.where(np.isfinite(curve), curve, np.nan)
        edges = np.unique(np.linspace(0, longest, min(longest, _CURVE_POINTS) + 1).astype(int))
        steps = [
            ((lo + hi - 1) / 2, table[:, lo:hi][~np.isnan(table[:, lo:hi])])
            for lo, hi in pairwise(edges)
        ]
        kept = [(position, _short(float(part.mean()))) for position, part in steps if len(part)]
        means[name] = [[position for position, _ in kept], [mean for _, mean in kept]]
    return means


def _pack(task: str, run: RunResults, recipes: list[str], chunks: list[str]) -> list[list[int]]:
    """Append the chunks of a task; returns [first sample, number of the chunk] of each."""
    index: list[list[int]] = []
    pending: list[str] = []
    first = 0

    def flush() -> None:
        packed = gzip.compress(f"[{','.join(pending)}]".encode(), compresslevel=6, mtime=0)
        index.append([first, len(chunks)])
        chunks.append(base64.b64encode(packed).decode())
        pending.clear()

    for i, text in enumerate(_sample_texts(task, run, recipes)):
        if not pending:
            first = i
        pending.append(text)
        if sum(map(len, pending)) >= _CHUNK:
            flush()
    if pending:
        flush()
    return index


def _sample_texts(task: str, run: RunResults, recipes: list[str]) -> Iterator[str]:
    """Yield each sample as JSON; equal answers of several recipes are stored once.

    `texts`: [answer, tokens], the answer null if it is the joined tokens. `which`: by recipe, the
    index in texts, or -1 without an answer, or the problem.
    """
    lines = run.lines.get(task, {})
    for sample, prompt in run.prompts.get(task, {}).items():
        texts: dict[tuple[str, tuple[str, ...]], int] = {}
        which: list[int | str] = []
        for recipe in recipes:
            line = lines.get((sample, recipe))
            if line is None or line.get("problem"):
                which.append(line["problem"] if line else -1)
                continue
            key = str(line.get("answer") or ""), tuple(line.get("tokens") or ())
            which.append(texts.setdefault(key, len(texts)) if any(key) else -1)
        context, cut = shorten(str(prompt.get("context") or ""))
        yield json.dumps(
            {
                "context": context,
                "cut": cut,
                "question": str(prompt.get("question") or ""),
                "reference": _text(prompt.get("reference")),
                "fields": {k: v for k, v in prompt.items() if k not in _PROMPT_FIELDS},
                "texts": [[None if "".join(t) == a else a, t] for a, t in texts],
                "which": which,
            },
            ensure_ascii=False, separators=(",", ":"),
        )  # fmt: skip


def shorten(context: str) -> tuple[list[str], int]:
    """Return the context, or its first and last 2,000 characters; and how many are left out."""
    left_out = len(context) - 2 * CONTEXT_ENDS
    if left_out <= 0:
        return [context], 0
    return [context[:CONTEXT_ENDS], context[-CONTEXT_ENDS:]], left_out


def _text(reference: Any) -> str:
    """Return a reference as text; several expected strings one per line."""
    if isinstance(reference, list):
        return "\n".join(map(str, reference))
    return "" if reference is None else str(reference)


def _unique(names: list[str]) -> list[str]:
    """Return the names, with a number where one repeats."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]


def _short(value: float | None) -> float | None:
    """Return a number with five significant digits; None for None, NaN or infinity."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.5g}")
