"""The classes that `attach` does not check again: `kvloom/hf/tested_models.json`."""

from __future__ import annotations

import json
from pathlib import Path

import published

PATH = Path(__file__).parents[2] / "src" / "kvloom" / "hf" / "tested_models.json"
COMPARED = "equal", "refused", "different", "unused", "crash"


def tables() -> dict[str, dict[str, list[str]]]:
    """Return, by version of transformers, the kinds of layers of each class that is equal.

    A class with a form that is not equal is left out: its other forms are checked at `attach`.
    Prompts with an image are not: what kvloom does not compute of them is refused in the step.
    """
    return {version: _classes(models) for version, models in published.load().items()}


def text() -> str:
    """Return the file's content."""
    versions = (
        f" {json.dumps(version)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found))
        + "\n }"
        for version, found in tables().items()
    )
    return "{\n" + ",\n".join(versions) + "\n}\n"


def _classes(models: dict[tuple[str, str], published.Records]) -> dict[str, list[str]]:
    kinds: dict[str, set[str]] = {}
    others = set()
    for (_, name), records in models.items():
        for record in records:
            if record["form"] == "image" or record["outcome"] not in COMPARED:
                continue
            if record["outcome"] == "equal":
                kinds.setdefault(name, set()).update(record["layers"])
            else:
                others.add(name)
    return {name: sorted(kinds[name]) for name in kinds if name not in others}
