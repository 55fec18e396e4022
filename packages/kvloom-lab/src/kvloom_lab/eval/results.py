"""The folder of results of `kvloom eval`: finished samples are kept, and a later run resumes.

`ResultFolder` writes it and `read_run` reads all of it. docs/reference/result-files.md describes
the files.
"""

from __future__ import annotations

import json
import math
import os
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvloom.errors import InputError

from ..workload.files import (
    Record,
    append_lines,
    finished_lines,
    parsed_json,
    read_records,
    write_whole,
)
from .summary import Figures, summarize
from .tasks import TASKS

FORMAT = 1
_OF_FIGURES = {"kvloom", "torch", "transformers", "cpu", "gpu", "threads"}
"""What of its environment decides a run's figures."""


class ResultFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def check(path: str | Path, run: dict[str, Any]) -> None:
        """Raise `InputError` if a folder cannot be written, or belongs to another run.

        run: parts of run.json. The error names the first difference.
        """
        path = Path(path)
        existing = next(x for x in (path, *path.absolute().parents) if x.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            reason = "no permission" if existing.is_dir() else f"{str(existing)!r} is a file"
            raise InputError(f"cannot write to {str(path)!r}: {reason}; give another folder")
        if not (path / "run.json").exists():
            if any(path.glob("*.jsonl")):
                raise InputError(
                    f"{str(path)!r} has results and no run.json, which says of which run they are; "
                    "give another folder"
                )
            return
        before = read_head(path)
        for part in run:
            ours, theirs = json.loads(json.dumps(run[part])), before.get(part, {})
            for name in ours:
                if part == "environment" and name not in _OF_FIGURES:
                    continue
                if theirs.get(name) != ours.get(name):
                    raise InputError(
                        f"{str(path)!r} holds results with {part} {name} "
                        f"{theirs.get(name)!r}, and this run has {ours.get(name)!r}; give "
                        "another --out, or the same options"
                    )

    @classmethod
    def open(cls, path: str | Path, run: dict[str, Any]) -> ResultFolder:
        """Create a folder for a run, or continue one with the same model and settings.

        run: the content of run.json. Raises `InputError` as `check` does.
        """
        cls.check(path, run)
        folder = cls(Path(path))
        file = folder.path / "run.json"
        if file.exists():
            return folder
        try:
            head = {"format": FORMAT, **run}
            write_whole(file, json.dumps(head, indent=2, ensure_ascii=False))
        except OSError as error:
            raise InputError(
                f"cannot write to {str(path)!r}: {error.strerror}; give another folder"
            ) from error
        return folder

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the finished lines of `name`.jsonl; remove a damaged last line."""
        return [record.value for record in finished_lines(self.path / f"{name}.jsonl")]

    def outcomes(self, task: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the last line of each sample and recipe of a task."""
        return {(line["sample"], line["recipe"]): line for line in self.lines(task)}

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Add lines to `name`.jsonl; raises `InputError` if the disk is full."""
        append_lines(self.path / f"{name}.jsonl", lines, "the finished samples")


def read_head(path: Path) -> dict[str, Any]:
    """Return run.json of a folder; raises `InputError` for none, or another format."""
    file = path / "run.json"
    try:
        run = parsed_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{str(path)!r} has no run.json, and no metrics.json of kvpress; give a folder that "
            "'kvloom eval --out' wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"{str(file)!r} cannot be read ({error}); give a folder that 'kvloom eval --out' wrote"
        ) from error
    version = run.get("format") if isinstance(run, dict) else None
    if version != FORMAT:
        raise InputError(
            f"{str(file)!r} has format {version}, and this kvloom reads {FORMAT}; run kvloom "
            "eval again into another folder"
        )
    for part in ("model", "environment", "settings"):
        if not isinstance(run.get(part, {}), dict):
            raise InputError(
                f"{part!r} in {str(file)!r} is no table; run kvloom eval again into another folder"
            )
    return run


_NUMBERS = ("kv_bytes", "exact_bytes")
_MORE_NUMBERS = ("bits_per_value", "tokens_read")  # of recipes that have them
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


def _is_number(value: Any) -> bool:
    """Return whether a value of a line is a number that a float can be, or None."""
    if isinstance(value, int):
        return value.bit_length() < 1000 and not isinstance(value, bool)
    return value is None or isinstance(value, float)


def _check_optional(record: Record) -> None:
    """Raise `InputError` if tokens, curves or seconds have another type."""
    line = record.value
    if not isinstance(line.get("tokens") or [], list):
        raise record.problem("needs a list in 'tokens'")
    curves, seconds = line.get("curves") or {}, line.get("seconds") or {}
    if not isinstance(seconds, dict) or not all(
        _is_number(x) and (x is None or x >= 0) for x in seconds.values()
    ):
        raise record.problem("needs numbers of at least 0 in 'seconds'")
    lists = isinstance(curves, dict) and all(isinstance(x, list) for x in curves.values())
    if not lists or not all(all(map(_is_number, curve)) for curve in curves.values()):
        raise record.problem("needs lists of numbers in 'curves'")


def _read_task(path: Path, run: RunResults) -> None:
    """Add the lines of one task's file; tokens that repeat share one string."""
    for record in read_records(path, {"task": str, "sample": str, "recipe": str}, REMEDY):
        line = record.value
        if line["task"] not in TASKS:  # the direction of its scores is unknown
            raise InputError(
                f"{str(path)!r} has results of the task {line['task']!r}, which is not installed; "
                "install the package that adds it, or remove the file"
            )
        recipes = run.settings.get("recipes")
        if isinstance(recipes, dict | list) and line["recipe"] not in recipes:
            raise record.problem(f"has the recipe {line['recipe']!r}, not in run.json")
        if line["sample"] not in run.prompts.get(line["task"], {}):
            raise record.problem(f"has the sample {line['sample']!r}, not in prompts.jsonl")
        if line.get("problem"):
            if not isinstance(line["problem"], str):
                raise record.problem("needs text in 'problem'")
            line.pop("scores", None)
        else:
            if not line.get("scores") or not isinstance(line["scores"], dict):
                raise record.problem("has neither scores nor a problem")
            for name in (*_NUMBERS, *(name for name in _MORE_NUMBERS if name in line)):
                number = line.get(name)
                if number is None or not _is_number(number) or not 0 <= number < math.inf:
                    raise record.problem(f"needs a number of at least 0 in {name!r}")
            if not line["exact_bytes"]:
                raise record.problem("needs a number above 0 in 'exact_bytes'")
            for name, value in line["scores"].items():
                if not _is_number(value) or value is None or not math.isfinite(value):
                    raise record.problem(f"needs a finite number as the score {name!r}")
            _check_optional(record)
            line["tokens"] = [sys.intern(str(token)) for token in line.get("tokens") or ()]
            line["curves"] = {
                name: array("f", [float("nan") if x is None else x for x in curve])
                for name, curve in (line.get("curves") or {}).items()
            }
        run.lines.setdefault(line["task"], {})[line["sample"], line["recipe"]] = line
