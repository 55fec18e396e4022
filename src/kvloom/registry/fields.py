"""Whether the fields of a part of a recipe hold what their annotations say.

Decides types alone: which numbers and names are allowed is each part's own matter.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from ..errors import RecipeError

_SPELLED = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    types.NoneType: "None",
}


def typed(part: Any, *names: str) -> None:
    """Raise `RecipeError` for the first of these fields of a dataclass that has another type.

    A whole number is a number too; True and False are none.
    """
    hints = _hints(part.__class__)
    for name in names:
        value = getattr(part, name)
        if not _fits(value, hints[name]):
            raise RecipeError(f"{name}={value!r} must be {_spelled(hints[name])}")


@cache
def _hints(part: Any) -> dict[str, Any]:
    return get_type_hints(part)


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(hint))
    if get_origin(hint) is tuple:  # of any length
        return isinstance(value, tuple) and all(_fits(x, get_args(hint)[0]) for x in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else hint)


def _spelled(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [one for one in get_args(hint) if not (one is int and float in get_args(hint))]
        return " or ".join(map(_spelled, kinds))
    if get_origin(hint) is tuple:
        return f"a tuple of them, each {_spelled(get_args(hint)[0])}"
    return _SPELLED.get(hint) or f"a {hint.__name__}"
