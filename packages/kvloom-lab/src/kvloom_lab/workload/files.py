"""Files that are written whole: JSON lines, files of kvloom's cache folder, and tuned recipes.

Of JSON lines, every line is written whole, so an interrupted run leaves at most one damaged last
line, which is removed; an error names the file and the line. `kvloom tune` stores recipes in one
folder for each model's weights, where `kvloom_lab.auto` reads them.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kvloom.errors import InputError, RecipeError
from kvloom.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Fields = Mapping[str, type[str | list | dict]]
"""Names of required fields, with their types."""
_WHAT = {str: "text", list: "a list", dict: "an object"}


class Record(NamedTuple):
    """One object, with its file and line. remedy: what errors advise."""

    file: Path
    line: int
    value: dict[str, Any]
    remedy: str

    def problem(self, reason: str) -> InputError:
        """Return an error that names file and line."""
        return InputError(f"line {self.line} of {str(self.file)!r} {reason}; {self.remedy}")


def read_records(
    file: Path, fields: Fields | None = None, remedy: str = "remove the line"
) -> Iterator[Record]:
    """Yield the objects of a file; empty lines do not count.

    Raises `InputError` for a file that cannot be read, and for a line that is not a JSON object
    with these fields.
    """
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(opened, start=1):
                if line.strip():
                    yield _record(file, number, line, fields or {}, remedy)
    except OSError as error:
        raise InputError(
            f"{str(file)!r} cannot be read ({error.strerror}); give another file"
        ) from error


def _record(file: Path, number: int, line: bytes, fields: Fields, remedy: str) -> Record:
    record = Record(file, number, {}, remedy)
    try:
        value = parsed_json(line.decode("utf-8"))
        if b"\\u" in line:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # refuses half a surrogate pair
    except UnicodeError:
        raise record.problem("is not UTF-8 text") from None
    except ValueError as error:
        raise record.problem(f"is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise record.problem("is not a JSON object")
    for name, kind in fields.items():
        if not isinstance(value.get(name), kind):
            raise record.problem(f"needs the field {name!r} with {_WHAT[kind]}")
    return record._replace(value=value)


def finished_lines(file: Path) -> list[Record]:
    """Return the objects of a file that a run writes; remove a last line that is not whole."""
    if not file.exists():
        return []
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(file, whole)
    return list(read_records(file))


def append_lines(file: Path, lines: Sequence[dict[str, Any]], finished: str) -> None:
    """Add lines to a file; lines that were written in part are removed.

    finished: what is not lost if the disk is full, in words. Raises `InputError`.
    """
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    before = file.stat().st_size if file.exists() else 0
    try:
        with file.open("ab") as opened:
            opened.write(data)
    except OSError as error:
        if file.exists():
            os.truncate(file, before)
        raise InputError(
            f"cannot write to {str(file)!r}: {error.strerror}; {finished} are kept: free some "
            "space and run the same command again"
        ) from error


def finite(data: Any) -> Any:
    """Return plain data with None for each number that JSON cannot contain."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def parsed_json(text: str) -> Any:
    """Return JSON data; raises `ValueError` for other text, and for data that are nested deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises `OSError`, and `ValueError` for other content."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def write_whole(target: Path, text: str) -> None:
    """Write text in UTF-8; makes the folders, and replaces a former file. Raises `OSError`."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(target)


def store_recipe(recipe: Recipe) -> Path:
    """Write a tuned recipe, completely or not at all, and return its file.

    A recipe for the same text, context and bound is replaced. Raises `InputError` if the file
    cannot be written.
    """
    tuned = recipe.tuned
    assert tuned is not None, "only tuned recipes are stored"
    target = _folder(tuned.model) / f"{tuned.bound}-{tuned.context}-{tuned.text_sha256[:8]}.toml"
    try:
        write_whole(target, recipe.to_toml())
    except OSError as error:
        raise InputError(
            f"the tuned recipe cannot be written to {target}: {error.strerror}; its scores are "
            "kept: set XDG_CACHE_HOME to a folder that can be written, and run the same again"
        ) from error
    return target


def stored_recipes(weights: str) -> list[Recipe]:
    """Return the recipes that were tuned for a model, named by their files.

    weights: the fingerprint, as in `Tuned.model`. Raises `InputError` for a damaged file.
    """
    recipes = []
    for path in sorted(_folder(weights).glob("*.toml")):
        try:
            recipe = Recipe.from_toml(path)
        except RecipeError as error:
            raise InputError(f"the stored recipe {path} is damaged: {error}; remove it") from error
        if recipe.tuned is not None and recipe.tuned.model == weights:
            recipes.append(replace(recipe, name=str(path)))
    return recipes


def _folder(weights: str) -> Path:
    return cache_folder() / "tuned" / weights


def cache_folder() -> Path:
    """Return kvloom's folder for files that can be made again: in `XDG_CACHE_HOME`, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvloom"
