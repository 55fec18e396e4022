"""Read a folder that `kvloom eval` wrote; docs/reference/result-files.md describes its files."""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.errors import InputError

from ...workload.json_lines import read_records
from ..result_files import read_head
from ..summary import Figures, summarize

_NUMBERS = ("kv_bytes", "exact_bytes")
REMEDY = "remove the line and run 'kvloom eval' again, which measures the sample again"


@dataclass
class RunResults:
    """The results of one folder.

    counts: what shares count, "bytes" or "tokens". prompts: task → sample → its line.
    lines: task → (sample, recipe) → its line. figures: of each task and recipe.
    """

    name: str
    counts: str
    model: dict[str, Any]
    environment: dict[str, Any]
    settings: dict[str, Any]
    prompts: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    lines: dict[str, dict[tuple[str, str], dict[str, Any]]] = field(default_factory=dict)
    figures: list[Figures] = field(default_factory=list)


def read_run(folder: Path) -> RunResults:
    """Return the results in a folder of `kvloom eval`.

    Raises `InputError` for a folder without run.json, another format, a damaged line, or if no
    sample has scores.
    """
    head = read_head(folder)
    run = RunResults(
        folder.resolve().name, "bytes", head.get("model", {}), head.get("environment", {}),
        head.get("settings", {}),
    )  # fmt: skip
    prompts = folder / "prompts.jsonl"
    if not prompts.is_file():
        raise InputError(
            f"{str(folder)!r} has no prompts.jsonl; give a folder that 'kvloom eval --out' wrote"
        )
    for record in read_records(prompts, {"task": str, "sample": str, "context": str}, REMEDY):
        prompt = record.value
        run.prompts.setdefault(prompt["task"], {})[prompt["sample"]] = prompt
    for path in sorted(folder.glob("*.jsonl")):
        if path.name != prompts.name:
            _read_task(path, run)
    run.figures = summarize(line for lines in run.lines.values() for line in lines.values())
    if not any(figures.samples for figures in run.figures):
        problem = next((figures.problem for figures in run.figures if figures.problem), None)
        reason = f" (the first problem: {problem})" if problem else ""
        raise InputError(
            f"{str(folder)!r} has no finished sample{reason}; run 'kvloom eval' again with the "
            "same --out, it continues"
        )
    return run


def _read_task(path: Path, run: RunResults) -> None:
    """Add the lines of one task's file; tokens that repeat share one string."""
    for record in read_records(path, {"task": str, "sample": str, "recipe": str}, REMEDY):
        line = record.value
        if line["sample"] not in run.prompts.get(line["task"], {}):
            raise record.problem(f"has the sample {line['sample']!r}, not in prompts.jsonl")
        if not line.get("problem"):
            if not isinstance(line.get("scores"), dict):
                raise record.problem("has neither scores nor a problem")
            for name in _NUMBERS:
                if not isinstance(line.get(name), int | float):
                    raise record.problem(f"needs a number in {name!r}")
            for name, value in line["scores"].items():
                if not isinstance(value, int | float | None):
                    raise record.problem(f"needs a number as the score {name!r}")
            line["tokens"] = [sys.intern(str(token)) for token in line.get("tokens") or ()]
            line["curves"] = {
                name: array("f", [float("nan") if x is None else x for x in curve])
                for name, curve in (line.get("curves") or {}).items()
            }
        run.lines.setdefault(line["task"], {})[line["sample"], line["recipe"]] = line
