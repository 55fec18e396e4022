"""Recipes as plain nested data and as TOML documents, in both directions without loss.

The annotations of a part's fields say how a table is read, so parts from plugins need nothing else.
A table of a score, an index or a format names itself with `kind`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from ..errors import RecipeError
from ..keep import SCORERS, Keep, Scorer
from ..recall import INDEXES, Index
from ..registry import Registry
from ..registry.fields import alternatives, field_types, missing_fields
from ..store import FORMATS, Format, Packed
from .layers import UNCHANGED, Unchanged

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Built = TypeVar("Built")
_KINDS: dict[Any, Registry] = {Scorer: SCORERS, Index: INDEXES, Format: FORMATS}
_PLAIN_KIND = Packed.kind  # written without its kind, as before there were others
_NOTHING = {"keep": "all", "recall": "off"}  # how an override removes a part: TOML has no null


def to_dict(part: Any) -> dict[str, Any]:
    """Return a dataclass as plain nested data, without fields that are None or False by default.

    Raises `RecipeError` for a part that is not registered, and so has no name to write.
    """
    table: dict[str, Any] = {}
    for base, registry in _KINDS.items():
        if isinstance(part, base):
            if registry.get(part.kind) is not type(part):
                raise RecipeError(
                    f"{type(part).__name__} cannot be written down; register it with "
                    f"kvloom.register_{registry.what}"
                )
            if part.kind != _PLAIN_KIND:
                table["kind"] = part.kind
    for field in fields(part):
        value = getattr(part, field.name)
        if value is UNCHANGED or (value is field.default and (value is None or value is False)):
            continue
        if value is None and Unchanged in alternatives(field_types(part.__class__)[field.name]):
            value = _NOTHING[field.name]
        table[field.name] = _plain(field.name, value)
    return table


def _plain(name: str, value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if callable(value):
        raise RecipeError(
            f"{name}: a rule that is a function cannot be written down; register a score, or name "
            f"one of {', '.join(SCORERS)}"
        )
    return [_plain(name, item) for item in value] if isinstance(value, tuple) else value


def from_dict(cls: type, table: Any, where: str = "recipe") -> Any:
    """Build a dataclass from the data of `to_dict`.

    where: what errors call it. Raises `RecipeError` for a field that does not exist, is missing or
    has a wrong type.
    """
    names = [field.name for field in fields(cls)]
    if not isinstance(table, dict):
        raise RecipeError(f"{where} must be a table of {', '.join(names)}, not {table!r}")
    unknown = sorted(set(table) - set(names), key=str)
    if unknown:
        raise RecipeError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(names)}")
    if cls is Keep:
        table = {"budget": {}, **table}
    if missing := missing_fields(cls, table):
        raise RecipeError(f"{where}: {cls.__name__} needs the field {missing[0]!r}")
    types = field_types(cls)
    return cls(**{name: _value(types[name], value, name) for name, value in table.items()})


def _value(hint: Any, value: Any, name: str) -> Any:
    """Return the value of a field from plain data; the field's own class checks it."""
    if value is None or value == _NOTHING.get(name):
        return None
    for kind in alternatives(hint):
        for base, registry in _KINDS.items():
            if isinstance(kind, type) and issubclass(kind, base):
                return _of_kind(registry, value, name)
        if is_dataclass(kind):
            return from_dict(kind, value, name)  # type: ignore[arg-type]
        member = get_args(kind)[0] if get_origin(kind) is tuple else None
        if is_dataclass(member) and isinstance(value, list):
            return tuple(from_dict(member, item, name) for item in value)  # type: ignore[arg-type]
    return _as_tuple(value)


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple, and the lists in it likewise."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _of_kind(registry: Registry, data: Any, name: str) -> Any:
    """Build the score, index or format whose `kind` a table names, or which is its kind alone."""
    table = dict(data) if isinstance(data, dict) else {}
    kind = table.pop("kind", None) if isinstance(data, dict) else data
    if registry is FORMATS and isinstance(data, dict) and kind is None:
        kind = _PLAIN_KIND
    if not isinstance(kind, str) or kind not in registry:
        raise RecipeError(f"{name} kind={kind!r} is not one of {', '.join(registry)}")
    return from_dict(registry[kind], table, name)


def to_toml(data: dict[str, Any]) -> str:
    """Return the data of `to_dict` as a TOML document."""
    return "\n".join(_lines(data, "", "[{}]")) + "\n"


def read_toml(source: str | Path, build: Callable[[dict[str, Any]], Built]) -> Built:
    """Return what `build` makes of a TOML document, or of a file with one (see `is_file`).

    Raises `RecipeError` if the file cannot be read, and with the file's name if it is not a recipe.
    """
    if not is_file(source):
        return build(_parsed(str(source)))
    try:
        return build(_parsed(Path(source).read_text(encoding="utf-8")))
    except OSError as error:
        why = f"cannot be read ({error.strerror}); give an existing TOML file"
    except UnicodeDecodeError:
        why = "is not UTF-8 text; give a TOML file"
    except RecipeError as error:
        why = f"is not a recipe: {error}"
    raise RecipeError(f"recipe file {str(source)!r} {why}")


def is_file(source: str | Path) -> bool:
    """Return whether this is a recipe file's path: a `Path`, a name in .toml, or a file."""
    if isinstance(source, Path):
        return True
    return "\n" not in source and (source.endswith(".toml") or os.path.isfile(source))


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of 4,300 digits, nested brackets
        raise RecipeError(f"not a TOML recipe: {error}") from error


def _lines(table: dict[str, Any], path: str, header: str) -> list[str]:
    """Return a table's lines: its own values, then its tables, then its lists of tables."""
    tables = {k: v for k, v in table.items() if isinstance(v, dict) and (v or path)}
    lists = {k: v for k, v in table.items() if isinstance(v, list) and v and _all_tables(v)}
    plain = {k: v for k, v in table.items() if not isinstance(v, dict) and k not in lists}
    lines = [header.format(path)] if path and (plain or not tables) else []
    lines += [f"{k} = {_toml_value(k, v)}" for k, v in plain.items()]
    below = [(key, inner, "[{}]") for key, inner in tables.items()]
    below += [
        (key, inner, "[[{}]]") for key, tables_of_list in lists.items() for inner in tables_of_list
    ]
    for key, inner, form in below:
        inner_lines = _lines(inner, f"{path}.{key}" if path else key, form)
        lines += inner_lines if inner_lines[:1] == [""] else ["", *inner_lines]
    return lines


def _all_tables(values: list) -> bool:
    return all(isinstance(value, dict) for value in values)


def _toml_value(name: str, value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(name, item) for item in value) + "]"
    if not isinstance(value, int | float):
        raise RecipeError(f"{name}={value!r} cannot be written in TOML; use to_dict")
    return str(value).lower()  # of True, and of 1e-09
