"""Recipes by layer: which layers an override names, and the plain recipe of one layer.

A layer has the model's number: layers that kvloom does not cache, such as those with a sliding
window, count too. "first 2" and "last 2" count the layers that kvloom caches.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from ..errors import RecipeError

if TYPE_CHECKING:
    from .spec import Recipe

_END = re.compile(r"(first|last)\s*(\d+)")
_RANGE = re.compile(r"(\d+)\s*(?:-\s*(\d+))?")


class Unchanged(enum.Enum):
    """The value of a part that a layer override leaves as it is."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


def spelled(where: Any) -> str:
    """Return `where` as "3", "0-3", "first 2" or "last 2"; raises `RecipeError` for any other."""
    text = str(where).strip() if type(where) in (int, str) else ""
    if (end := _END.fullmatch(text)) and int(end[2]):
        return f"{end[1]} {int(end[2])}"
    if match := _RANGE.fullmatch(text):
        low, high = int(match[1]), int(match[2] or match[1])
        if low <= high:
            return str(low) if match[2] is None else f"{low}-{high}"
    raise RecipeError(
        f'where={where!r} does not name layers; use a number (3), a range ("0-3"), "first 2" or '
        '"last 2"'
    )


def select(where: str, numbers: Sequence[int]) -> Sequence[int]:
    """Return those of the cached layers' `numbers` that `where` names.

    Raises `RecipeError` where it names a layer that kvloom does not cache. A range may have such
    layers in it.
    """
    if end := _END.fullmatch(where):
        count = int(end[2])
        chosen = numbers[:count] if end[1] == "first" else numbers[max(0, len(numbers) - count) :]
        missing = count > len(numbers)
    else:
        low, _, high = where.partition("-")
        chosen = [n for n in numbers if int(low) <= n <= int(high or low)]
        missing = not chosen or int(high or low) > numbers[-1]
    if missing:
        raise RecipeError(
            f"layers {where!r} do not exist; kvloom caches {len(numbers)} layers of this model: "
            f"{listed(numbers)}"
        )
    return chosen


def listed(numbers: Sequence[int]) -> str:
    """Return numbers in ascending order as "0-3, 7"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"


def for_layer(recipe: Recipe, number: int, numbers: Sequence[int]) -> Recipe:
    """Return the plain recipe of one layer; see `Recipe.for_layer`."""
    parts: dict[str, Any] = {"recall": recipe.recall}
    for override in recipe.layers:
        if number in select(override.where, numbers):
            parts |= override.parts
    recall = parts["recall"]
    if recall is not None and list(numbers).index(number) < recall.full_layers:
        parts["recall"] = None
    try:
        return _interned(replace(recipe, layers=(), tuned=None, **parts))
    except RecipeError as error:  # overrides that fit the recipe one by one, but not together
        raise RecipeError(f"layer {number}: {error}") from error


def budget_ranks(recipe: Recipe, numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (rank, count) of each layer among the layers that divide one budget."""
    keys = [budget_key(for_layer(recipe, number, numbers)) for number in numbers]
    return [(keys[:i].count(key), keys.count(key)) for i, key in enumerate(keys)]


def budget_key(plain: Recipe) -> Hashable:
    """Return what the layers that divide one budget have in common: `keep`.

    With layers="joint", tokens move between these layers, so their `store` is equal, too.
    """
    joint = plain.keep is not None and plain.keep.budget.layers == "joint"
    return _exact(plain.keep), _exact(plain.store) if joint else None


_recipes: WeakValueDictionary[Hashable, Recipe] = WeakValueDictionary()


def _interned(recipe: Recipe) -> Recipe:
    """Return the one object for all recipes equal to this one: kernels are looked up by it."""
    return _recipes.setdefault(_exact(recipe), recipe)


def _exact(value: Any) -> Hashable:
    """Return a key that differs wherever the fields do: 1 == 1.0, but a budget reads them apart."""
    if is_dataclass(value):
        return type(value), *(_exact(getattr(value, field.name)) for field in fields(value))
    return tuple(map(_exact, value)) if isinstance(value, tuple) else (type(value), value)
