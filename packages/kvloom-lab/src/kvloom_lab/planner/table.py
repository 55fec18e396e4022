"""The table of `kvloom plan`."""

from __future__ import annotations

from collections.abc import Sequence

from ..show.tables import FigureTable
from .hardware import PRESETS
from .plan_recipes import Plan, PlanRow
from .step import CHUNK
from .units import UNLIMITED, show_bytes, show_rate


def plan_table(plan: Plan) -> FigureTable:
    """Return a table of the recipes, and notes that explain it."""
    most = max((row.peak_bytes or row.kv_bytes or 0 for row in plan.rows), default=0)
    unit, name = (2**30, "GiB") if most >= 2**30 else (2**20, "MiB")
    columns = [f"KV,\n{name}", f"peak,\n{name}"]
    if plan.memory is not None:
        columns += ["fits", "longest\ncontext", "longest,\nchunked", "largest\nbatch"]
    timed = any(row.step_ms for row in plan.rows)
    if timed:
        columns += ["tok/s", "tok/s,\nlow to high", "limited\nby"]
    if plan.target is not None:
        columns.append(f"longest at\n{plan.target:g} tok/s")
    table = FigureTable(_title(plan), "", columns)
    for heading, rows in _sections(plan):
        if heading:
            table.section(heading)
        for row in rows:
            table.add(row.recipe, *_plan_cells(plan, row, timed, unit))
    problems = [f"{row.recipe}: {row.problem}" for row in plan.rows if row.problem]
    return table.captioned(" ".join(_plan_caption(plan, timed)), *problems, *plan.warnings)


def _title(plan: Plan) -> str:
    model = plan.model
    weights = f"{show_bytes(model.weights.nbytes)} of {model.weights.quantized or ''} weights"
    text = (
        f"{model.name} ({model.architecture}, {model.layers} layers, "
        f"{weights.replace('  ', ' ')}), "
        f"{plan.context:,} tokens of context, batch {plan.batch}"
    )
    if plan.hardware is not None:
        text += f"; {plan.hardware.describe()}"
    if plan.memory is not None and (plan.hardware is None or plan.memory != plan.hardware.memory):
        text += f"; {show_bytes(plan.memory)} of memory"
    return text


def _sections(plan: Plan) -> list[tuple[str, Sequence[PlanRow]]]:
    """Return rows by heading: those that reach the target first."""
    if plan.target is None:
        return [("", plan.rows)]
    reaching = [row for row in plan.rows if row.reaches]
    others = [row for row in plan.rows if not row.reaches]
    sections = [
        (f"reach {plan.target:g} tok/s", reaching),
        (f"do not reach {plan.target:g}, or do not fit", others),
    ]
    return [(heading, rows) for heading, rows in sections if rows]


def _plan_cells(plan: Plan, row: PlanRow, timed: bool, unit: int) -> list[str]:
    if row.problem or row.kv_bytes is None:
        return ["–"]
    peak = "–" if row.peak_bytes is None else f"{row.peak_bytes / unit:,.2f}"
    cells = [f"{row.kv_bytes / unit:,.2f}", peak]
    if plan.memory is not None:
        cells.append("yes" if row.fits else "chunked" if row.fits_in_chunks else "no")
        cells += map(_count_text, (row.longest_context, row.longest_in_chunks, row.largest_batch))
    if timed and row.step_ms and row.tokens_s:
        rates = row.tokens_s
        cells += [
            show_rate(rates.best),
            f"{show_rate(rates.low)} to {show_rate(rates.high)}",
            row.limit or "",
        ]
    elif timed:
        cells += ["–"] * 3
    if plan.target is not None:
        cells.append(_count_text(row.longest_at_target))
    return cells


def _count_text(number: int | None) -> str:
    if number is None:
        return "–"
    return "no limit" if number >= UNLIMITED else f"{number:,}" if number else "none"


def _plan_caption(plan: Plan, timed: bool) -> list[str]:
    """Return sentences that explain the columns."""
    sentences = [
        "KV: the cache with all its metadata, exact. Peak: weights, cache and activations while a "
        "prompt is read in one step."
    ]
    if plan.memory is not None:
        sentences.append(
            "Fits: the peak is within the memory; chunked: only if the prompt is read in chunks of "
            f"up to {CHUNK} tokens. Longest context: at batch {plan.batch}. Largest batch: at "
            f"{plan.context:,} tokens."
        )
    if timed and plan.hardware is not None:
        sentences.append(
            "Tok/s: in decoding, all rows together. Limited by: what takes most of a step "
            "(reading weights, reading the KV cache, arithmetic, or the overhead of Python)."
        )
        sentences += plan.hardware.notes()
    elif plan.hardware is None:
        sentences.append(f"Times need --hardware: {', '.join(PRESETS)}, this, or a file.")
    return sentences
