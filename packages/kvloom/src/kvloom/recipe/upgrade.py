"""Documents of recipes that a former version wrote.

Decides what a former field means now. Fields that concern one part alone are upgraded by the part.
"""

from __future__ import annotations

from typing import Any

from ..errors import RecipeError

_SCORES = ("rotated", "expected")  # that had the field `sinks`


def without_sinks_field(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a recipe without the former field `sinks` of scores and of fits.

    They take the number of `protect` now. Raises `RecipeError` where theirs is another.
    """
    if not any(_parts_with_sinks(table.get("keep")) for table in _tables(recipe)):
        return recipe
    for table in _tables(recipe):
        protect = table.get("protect", recipe.get("protect"))
        protected = protect.get("sinks", 0) if isinstance(protect, dict) else 0
        for name, part in _parts_with_sinks(table.get("keep", recipe.get("keep"))).items():
            if part["sinks"] != protected:
                raise RecipeError(
                    f"sinks={part['sinks']!r} of {name} differs from sinks={protected!r} of "
                    f"protect, which {name} takes now; leave it out, or give protect that number"
                )
    upgraded, layers = _changed(recipe), recipe.get("layers")
    if isinstance(layers, list):
        upgraded["layers"] = [_changed(x) if isinstance(x, dict) else x for x in layers]
    return upgraded


def _tables(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the table of a recipe, and those of its overrides."""
    layers = recipe.get("layers")
    overrides = layers if isinstance(layers, list) else []
    return [recipe, *(override for override in overrides if isinstance(override, dict))]


def _parts_with_sinks(keep: Any) -> dict[str, dict[str, Any]]:
    """Return the score and the fit of the table of a keep, where they have the field, by name."""
    parts = {name: keep.get(name) for name in ("scorer", "fit")} if isinstance(keep, dict) else {}
    tables = {name: x for name, x in parts.items() if isinstance(x, dict) and "sinks" in x}
    return {n: x for n, x in tables.items() if n == "fit" or x.get("kind") in _SCORES}


def _changed(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a recipe or of an override without the fields."""
    changed = {
        name: {field: x for field, x in part.items() if field != "sinks"}
        for name, part in _parts_with_sinks(table.get("keep")).items()
    }
    return {**table, "keep": {**table["keep"], **changed}} if changed else dict(table)
