"""The folder of results of `kvloom eval`: finished samples are kept, and a later run resumes.

The format is docs/reference/result-files.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvloom.errors import InputError

from ..workload import whole_file
from ..workload.json_lines import append_lines, finished_lines

FORMAT = 1


class ResultFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: str | Path, run: dict[str, Any]) -> ResultFolder:
        """Create a folder for a run, or continue one with the same model and settings.

        run: the content of run.json. Raises `InputError` if the folder belongs to another run, and
        names the first difference.
        """
        folder = cls(Path(path))
        file = folder.path / "run.json"
        if file.exists():
            before = read_head(folder.path)
            for part, names in (("environment", ["kvloom"]), ("model", None), ("settings", None)):
                ours = json.loads(json.dumps(run[part]))
                theirs = before.get(part, {})
                for name in names or ours:
                    if theirs.get(name) != ours.get(name):
                        raise InputError(
                            f"{str(path)!r} holds results with {part} {name} "
                            f"{theirs.get(name)!r}, and this run has {ours.get(name)!r}; give "
                            "another --out, or the same options"
                        )
            return folder
        try:
            head = {"format": FORMAT, **run}
            whole_file.write(file, json.dumps(head, indent=2, ensure_ascii=False))
        except OSError as error:
            raise InputError(
                f"cannot write to {str(path)!r}: {error.strerror}; give another folder"
            ) from error
        return folder

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the finished lines of `name`.jsonl; remove a damaged last line."""
        return [record.value for record in finished_lines(self.path / f"{name}.jsonl")]

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Add lines to `name`.jsonl; raises `InputError` if the disk is full."""
        append_lines(self.path / f"{name}.jsonl", lines, "the finished samples")


def read_head(path: Path) -> dict[str, Any]:
    """Return run.json of a folder; raises `InputError` for none, or another format."""
    file = path / "run.json"
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
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
    return run
