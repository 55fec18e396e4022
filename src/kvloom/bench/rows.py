"""What was measured, as plain data."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from .clock import Side, Times


@dataclass
class Row:
    """One side at one context.

    ms: median of a call; least_ms: the least. kv_bytes: of keys and values held, metadata and
    spare room included. read_bytes: what a call must read at least. gb_s: that over the median.
    ratios: how many times faster than another side this one is. fell: operations of kvloom that no
    kernel covers, which plain torch ran, and why. problem: why there are no figures.
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


def of(
    sides: Sequence[Side],
    times: dict[str, Times],
    against: Sequence[str],
    *,
    shape: str,
    context: int,
    batch: int,
) -> list[Row]:
    """One row a side; against: names of the sides that ratios are to, as far as they ran."""
    median = {name: statistics.median(t.ms) for name, t in times.items() if t.ms}
    rows = []
    for side in sides:
        row = Row(side.name, shape, context, batch, problem=side.problem)
        if side.name in median:
            row.ms, row.least_ms = median[side.name], min(times[side.name].ms)
            row.kv_bytes, row.read_bytes = side.held(), side.read()
            if row.read_bytes is not None:
                row.gb_s = row.read_bytes / row.ms / 1e6
            row.ratios = {name: median[name] / row.ms for name in against if name in median}
            row.fell = sorted(times[side.name].fell)
        rows.append(row)
    return rows


def to_json(rows: Sequence[Row], environment: dict[str, Any], limits: dict[str, Any]) -> str:
    """Return `{"environment": …, "limits": {"read_gb_s": …}, "rows": […]}`."""
    plain = [asdict(row) for row in rows]
    data = {"environment": environment, "limits": limits, "rows": plain}
    return json.dumps(data, indent=2, ensure_ascii=False)
