"""Read a folder that `kvloom eval` wrote; docs/reference/result-files.md describes its files."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..result_files import FORMAT
from ..summary import Figures, summarize

_NUMBERS = ("kv_bytes", "exact_bytes")


@dataclass
class Run:
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


def read_run(folder: Path) -> Run:
    """Return the results in a folder of `kvloom eval`.

    Raises `InputError` for a folder without run.json, another format, a damaged line, or if no
    sample has scores.
    """
    head = _read_head(folder)
    run = Run(
        folder.resolve().name, "bytes", head.get("model", {}), head.get("environment", {}),
        head.get("settings", {}),
    )  # fmt: skip
    prompts = folder / "prompts.jsonl"
    if not prompts.is_file():
        raise InputError(
            f"{str(folder)!r} has no prompts.jsonl; give a folder that 'kvloom eval --out' wrote"
        )
    for where, prompt in _objects(prompts, ("task", "sample", "context")):
        _check_names(where, prompt, ("task", "sample"))
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


def _read_head(folder: Path) -> dict[str, Any]:
    path = folder / "run.json"
    if not path.is_file():
        raise InputError(
            f"{str(folder)!r} has no run.json, and no metrics.json of kvpress; give a folder that "
            "'kvloom eval --out' wrote"
        )
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read {str(path)!r} as JSON: {error}; run kvloom eval again"
        ) from (error)
    found = head.get("format") if isinstance(head, dict) else None
    if found != FORMAT:
        raise InputError(
            f"{str(path)!r} has format {found!r}, and this kvloom reads format {FORMAT}; use the "
            "version of kvloom that wrote it, or run kvloom eval again"
        )
    return head


def _read_task(path: Path, run: Run) -> None:
    """Add the lines of one task's file; tokens that repeat share one string."""
    for where, line in _objects(path, ("task", "sample", "recipe")):
        _check_names(where, line, ("task", "sample", "recipe"))
        if line["sample"] not in run.prompts.get(line["task"], {}):
            raise _damaged(where, f"sample {line['sample']!r} is not in prompts.jsonl")
        if not line.get("problem"):
            if not isinstance(line.get("scores"), dict):
                raise _damaged(where, "it has neither scores nor a problem")
            for name in _NUMBERS:
                if not isinstance(line.get(name), int | float):
                    raise _damaged(where, f"{name} is not a number")
            for name, value in line["scores"].items():
                if not isinstance(value, int | float | None):
                    raise _damaged(where, f"score {name!r} is not a number")
            line["tokens"] = [sys.intern(str(token)) for token in line.get("tokens") or ()]
            line["curves"] = {
                name: array("f", [float("nan") if x is None else x for x in curve])
                for name, curve in (line.get("curves") or {}).items()
            }
        run.lines.setdefault(line["task"], {})[line["sample"], line["recipe"]] = line


def _objects(path: Path, required: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the object of each line; raises `InputError` at the first damaged one."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            where = f"{str(path)!r}, line {number}"
            if not text.strip():
                continue
            try:
                found = json.loads(text.decode("utf-8"))
            except ValueError as error:
                raise _damaged(where, "it is not JSON") from error
            if not isinstance(found, dict):
                raise _damaged(where, "it is not a JSON object")
            missing = [name for name in required if name not in found]
            if missing:
                raise _damaged(where, f"it has no field {missing[0]!r}")
            yield where, found


def _check_names(where: str, found: dict[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        if not isinstance(found[name], str):
            raise _damaged(where, f"{name!r} is not a string")


def _damaged(where: str, why: str) -> InputError:
    return InputError(
        f"{where} is damaged: {why}; delete the line and run 'kvloom eval' again, it measures the "
        "sample anew"
    )
