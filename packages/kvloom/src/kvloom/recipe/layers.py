"""Which layers an override names.

A layer has its index in the model: layers that kvloom does not cache, such as those with a sliding
window, count too. "first 2" and "last 2" count the layers that kvloom caches.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from typing import Any

from ..errors import RecipeError

_END = re.compile(r"(first|last)\s*(\d{1,9})")
_RANGE = re.compile(r"(\d{1,9})\s*(?:-\s*(\d{1,9}))?")


class Unchanged(enum.Enum):
    """The value of a part that a layer override leaves as it is."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED


def format_where(where: Any) -> str:
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


def select(where: str, layer_indices: Sequence[int]) -> Sequence[int]:
    """Return the indices of the cached layers that `where` names.

    Raises `RecipeError` where it names a layer that kvloom does not cache. A range may have such
    layers in it.
    """
    if end := _END.fullmatch(where):
        count = int(end[2])
        missing = count > len(layer_indices)
        chosen = layer_indices[:count] if end[1] == "first" else layer_indices[-count:]
    else:
        low, _, high = where.partition("-")
        chosen = [n for n in layer_indices if int(low) <= n <= int(high or low)]
        missing = not chosen or int(high or low) > layer_indices[-1]
    if missing:
        raise RecipeError(
            f"layers {where!r}: kvloom does not cache all of these; name some of the "
            f"{len(layer_indices)} that it caches: {listed(layer_indices)}"
        )
    return chosen


def listed(indices: Sequence[int]) -> str:
    """Return indices in ascending order as "0-3, 7"."""
    runs: list[list[int]] = []
    for n in indices:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs) or "none"
