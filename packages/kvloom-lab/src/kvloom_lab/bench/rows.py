"""Results of a benchmark as plain data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .timing import Candidate, Times


@dataclass
class Row:
    """One candidate at one context.

    Attributes:
        name: Of the candidate.
        shape: Of the tensors, or the model.
        context: Tokens.
        batch: Rows.
        ms: Median of a call.
        least_ms: The fastest call.
        kv_bytes: Keys and values in the cache, with metadata and spare room.
        read_bytes: The least that a call must read.
        gb_s: `read_bytes` over `ms`.
        ratios: How many times faster than each baseline this candidate is.
        fell: Operations of kvloom that fell back to plain torch, with the reason.
        problem: Why there are no figures.
    """

    name: str
    shape: str
    context: int
    batch: int
    ms: float | None = None
    least_ms: float | None = None
    kv_bytes: int | None = None
    read_bytes: int | None = None
    gb_s: float | None = None
    ratios: dict[str, float] = field(default_factory=dict)
    fell: list[str] = field(default_factory=list)
    problem: str | None = None


def make_rows(
    candidates: Sequence[Candidate],
    times: dict[str, Times],
    baselines: Sequence[str],
    *,
    shape: str,
    context: int,
    batch: int,
) -> list[Row]:
    """Return one row a candidate. baselines: candidates that ratios are to, if they have times."""
    median = {name: statistics.median(t.ms) for name, t in times.items() if t.ms}
    rows = []
    for candidate in candidates:
        row = Row(candidate.name, shape, context, batch, problem=candidate.problem)
        if candidate.name in median:
            row.ms, row.least_ms = median[candidate.name], min(times[candidate.name].ms)
            row.kv_bytes, row.read_bytes = candidate.kv_bytes(), candidate.read_bytes()
            if row.read_bytes is not None:
                row.gb_s = row.read_bytes / row.ms / 1e6
            row.ratios = {name: median[name] / row.ms for name in baselines if name in median}
            row.fell = sorted(times[candidate.name].fallbacks)
        rows.append(row)
    return rows


def to_data(
    rows: Sequence[Row], environment: dict[str, Any], limits: dict[str, Any]
) -> dict[str, Any]:
    """Return plain data. limits: `read_gb_s`."""
    return {"environment": environment, "limits": limits, "rows": [asdict(row) for row in rows]}
