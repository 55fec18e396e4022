"""Whether the fields of a part of a recipe have the types and values that they should have."""

from __future__ import annotations

import enum
import math
import types
from collections.abc import Collection, Iterable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import RecipeError

_MOST = 2**31 - 1  # positions are int32 in kernels
_TYPE_NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    types.NoneType: "None",
}


def check_fields(part: Any, *names: str) -> None:
    """Raise `RecipeError` for the first of these fields of a dataclass that has another type.

    An int is accepted where a float is expected; a bool is accepted only where a bool is expected.
    Neither NaN nor infinity is accepted.
    """
    hints = field_types(part.__class__)
    for name in names:
        value = getattr(part, name)
        check_finite(name, value)
        if not _fits(value, hints[name]):
            raise RecipeError(f"{name}={value!r} must be {_format_type(hints[name])}")


def check_finite(name: str, value: Any) -> None:
    """Raise `RecipeError` for NaN and for infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{name}={value!r} must be a finite number")


def check_whole(name: str, value: Any, least: int, unit: str = "", most: int = _MOST) -> None:
    """Raise `RecipeError` if a value is not a whole number from `least` to `most`.

    unit: what it counts, such as " of tokens".
    """
    if type(value) is not int or value < least:
        raise RecipeError(f"{name}={value!r} must be a whole number{unit}, {least} or more")
    if value > most:
        raise RecipeError(f"{name} is larger than {most:,}; use a smaller one")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise `RecipeError` if a value is not one of the choices, or not of its type."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise RecipeError(f"{name}={value!r} is not one of {', '.join(map(str, choices))}")


def missing_fields(part: Any, given: Collection[str]) -> list[str]:
    """Return the fields of a dataclass without a default that are not among the given names."""
    return [
        x.name
        for x in fields(part)
        if x.init and x.default is MISSING is x.default_factory and x.name not in given
    ]


@cache
def field_types(part: Any) -> dict[str, Any]:
    """The annotations of a class, resolved."""
    return get_type_hints(part)


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    if len(alternatives(hint)) > 1:
        return any(_fits(value, kind) for kind in alternatives(hint))
    if get_origin(hint) is tuple:  # of any length
        return isinstance(value, tuple) and all(_fits(x, get_args(hint)[0]) for x in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _format_type(hint: Any) -> str:
    kinds = alternatives(hint)
    if len(kinds) > 1:
        shown = [
            kind for kind in kinds if not (kind is int and float in kinds) and not _marker(kind)
        ]
        return " or ".join(map(_format_type, shown))
    if get_origin(hint) is tuple:
        return f"a tuple, each item {_format_type(get_args(hint)[0])}"
    article = "an" if hint.__name__[0] in "AEIOU" else "a"
    return _TYPE_NAMES.get(hint) or f"{article} {hint.__name__}"


def _marker(hint: Any) -> bool:
    """Whether a type marks an absent value: users never write it."""
    return isinstance(hint, type) and issubclass(hint, enum.Enum)
