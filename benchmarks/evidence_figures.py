"""Compute the published figures of the evidence again from the published samples.

    python benchmarks/evidence_figures.py && python benchmarks/evidence_tables.py

Figures without published samples do not change, nor do times, which samples do not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from evidence_tables import RESULTS, published_samples, read_samples
from kvloom_lab.eval.summary import paired_differences, summarize

Line = Mapping[str, Any]


def rows_by_kind(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Return the figures of each kind of text, with which the names of its samples start."""
    by_kind: dict[str, list[Line]] = {}
    for line in lines:
        by_kind.setdefault(line["sample"].partition("/")[0], []).append(line)
    return [
        {"kind": kind, **asdict(row)} for kind, some in by_kind.items() for row in summarize(some)
    ]


def over(lines: Iterable[Line], task: str, recipe: str, other: str) -> dict[str, Any]:
    """Return the difference of `correct` of one recipe from that of another."""
    own, others = (
        {x["sample"]: x for x in lines if (x["task"], x["recipe"]) == (task, name)}
        for name in (recipe, other)
    )
    return asdict(paired_differences(task, own, others)["correct"])


def recomputed(result: dict[str, Any], lines: list[Line]) -> dict[str, Any]:
    """Return a published result with the figures of its samples."""

    def key(row: dict[str, Any]) -> tuple[str | None, str, str]:
        return row.get("kind"), row["task"], row["recipe"]

    now = {key(row): row for row in [*map(asdict, summarize(lines)), *rows_by_kind(lines)]}

    def row_of(row: dict[str, Any]) -> dict[str, Any]:
        found = {name: x for name, x in now.get(key(row), {}).items() if x is not None}
        if "beside" in row:
            found["over_beside"] = over(lines, row["task"], row["recipe"], row["beside"])
        return row | found

    parts = [part for part in ("figures", "by_kind") if part in result]
    return result | {part: list(map(row_of, result[part])) for part in parts}


def main() -> None:
    for path in sorted(RESULTS.glob("*/evidence_*.json")):
        samples = path.with_suffix(".samples.jsonl.gz")
        if not samples.exists():
            continue
        result, lines = json.loads(path.read_text()), read_samples(samples)
        if run := result["protocol"].get("run"):  # recipes beside peers are of another file
            texts = {line["text"] for line in lines}
            lines += [line for line in published_samples(run) if line["text"] in texts]
        path.write_text(json.dumps(recomputed(result, lines), indent=2) + "\n")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
