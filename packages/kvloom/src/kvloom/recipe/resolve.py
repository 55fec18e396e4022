"""The compact spelling of recipes: "name:option=value,option=value@layers=recipe".

Every recipe also has the options `compress_after` and `sliding`. After "@" follows what is
different in some layers: "kivi@first 2=full@last 2=kivi:bits=4".
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import RecipeError
from ..registry.fields import alternatives, check_finite
from .named import GENERAL_OPTIONS, PARTS, RECIPES, Build
from .parts import LayerOverride
from .spec import Recipe
from .text import is_file

__all__ = ["RECIPES", "options", "part_options", "resolve", "summary"]

_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_OVERRIDE = re.compile(r"@(?=[^@=,:/\\]*=)")  # not the "@" of a path


def resolve(recipe: Recipe | str | Path) -> Recipe:
    """Return the recipe that this is, names, or is the path of.

    Args:
        recipe: A `Recipe`, which is returned as it is; a name, with options or without ("kivi",
            "kivi:group=64,residual=64"), and with other recipes for some layers ("kivi@first
            2=full"); or a TOML file ("recipe.toml"), see `recipe.is_file`. A file with the name of
            a recipe needs a folder in front ("./kivi").

    Returns:
        The recipe, named as the caller spelled it.

    Raises:
        RecipeError: The name, an option or a value is unknown, or the file has no recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):
        raise RecipeError(
            f"expected a Recipe, its name or its TOML file, got {type(recipe).__name__}"
        )
    if isinstance(recipe, Path) or (_OVERRIDE.search(recipe) and os.path.isfile(recipe)):
        return replace(Recipe.from_toml(Path(recipe)), name=str(recipe))
    first, *others = _OVERRIDE.split(recipe)
    base = _parse_recipe(first)
    if others:
        base = replace(base, layers=(*base.layers, *map(_parse_override, others)))
    return replace(base, name=recipe)


def summary(name: str) -> str:
    """Return the first line of a recipe's docstring."""
    return (inspect.getdoc(RECIPES[name]) or "").splitlines()[0]


def options(name: str) -> dict[str, Any]:
    """Return the options of a recipe and their defaults."""
    parameters = inspect.signature(RECIPES[name]).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    }


def part_options(name: str) -> dict[str, dict[str, Any]]:
    """Return the options of every part that a recipe lets one choose, with their defaults.

    Such a recipe passes options on to its score, index or format. None: the option has no default.
    """
    what = _part_option(RECIPES[name])
    if what is None:
        return {}
    return {kind: _defaults(PARTS[what][kind]) for kind in PARTS[what]}


def _parse_recipe(text: str) -> Recipe:
    name, _, rest = text.partition(":")
    name = name.strip()
    if name not in RECIPES and is_file(text.strip()):
        return Recipe.from_toml(Path(text.strip()))
    if "@" in name:
        raise RecipeError(f'{text!r}: spell layers as in "kivi@first 2=full"')
    if name not in RECIPES:
        raise RecipeError(
            f"no recipe named {name!r}{_nearest(name, RECIPES)}; there are {', '.join(RECIPES)}"
        )
    texts: dict[str, str] = {}
    for option, option_text in (_split_option(item) for item in rest.split(",") if item.strip()):
        if option in texts:
            raise RecipeError(f"option {option!r} of recipe {name!r} is given twice; give it once")
        texts[option] = option_text
    hints = _hints(name, RECIPES[name], texts)
    values = {key: _value(name, key, text, hints) for key, text in texts.items()}
    if values.get("tokens") and values.get("fraction"):
        raise RecipeError(
            f"recipe {name!r}: tokens={texts['tokens']} and fraction={texts['fraction']} are two "
            "sizes of one budget; give one of them"
        )
    sizes = [f"{key}={texts[key]}" for key in ("tokens", "fraction") if key in values]
    if sizes and not (values.get("tokens") or values.get("fraction")):
        raise RecipeError(
            f"recipe {name!r}: {' and '.join(sizes)} is no budget; give a number above 0"
        )
    general = {key: values.pop(key) for key in GENERAL_OPTIONS if key in values}
    return replace(RECIPES[name](**values), **general)


def _parse_override(text: str) -> LayerOverride:
    where, _, recipe = text.partition("=")
    parts = _parse_recipe(recipe)
    if parts.layers or parts.compress_after or parts.packs_windows:
        raise RecipeError(
            f"layers {where.strip()!r}: {recipe.strip()!r} has layers, compress_after or sliding "
            "of its own; give these to the whole recipe"
        )
    return LayerOverride(
        where, keep=parts.keep, store=parts.store, recall=parts.recall, protect=parts.protect
    )


def _split_option(option: str) -> tuple[str, str]:
    key, _, text = (part.strip() for part in option.partition("="))
    return key, text


def _part_option(build: Build) -> str | None:
    """Return the option that chooses the part to which a recipe passes further options."""
    parameters = inspect.signature(build).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return next((what for what in PARTS if what in parameters), None)


def _hints(name: str, build: Build, texts: dict[str, str]) -> dict[str, Any]:
    """Return the options that a recipe accepts, given these, and their annotations."""
    annotations, defaults = get_type_hints(build), options(name)
    hints = {key: annotations[key] for key in defaults}
    what = _part_option(build)
    if what is not None:
        kind = texts.get(what) or defaults[what]
        if kind not in PARTS[what]:
            raise RecipeError(
                f"{what}={kind!r} is not one of {', '.join(PARTS[what])}"
                f"{_nearest(kind, PARTS[what])}"
            )
        part = PARTS[what][kind]
        passed = get_type_hints(part)
        if both := [option for option in _defaults(part) if option in hints]:
            raise RecipeError(
                f"{what} {kind!r} and recipe {name!r} both have an option {both[0]!r}, so text "
                "cannot name the former; rename it, or compose the recipe in Python"
            )
        hints |= {option: passed[option] for option in _defaults(part)}
    return hints


def _defaults(part: type) -> dict[str, Any]:
    return {
        field.name: None if field.default is MISSING else field.default for field in fields(part)
    }


def _value(name: str, key: str, text: str, hints: dict[str, Any]) -> Any:
    """Return the value of an option, read as its annotation says."""
    hints = hints | GENERAL_OPTIONS
    if key not in hints:
        raise RecipeError(
            f"recipe {name!r} has no option {key!r}{_nearest(key, hints)}; it has "
            f"{', '.join(hints)}"
        )
    if not text:
        raise RecipeError(f"option {key!r} of recipe {name!r} needs a value: {key}=…")
    kinds = alternatives(hints[key])
    for number in (int, float):
        if number in kinds:
            try:
                value = number(text)
            except ValueError:
                continue
            check_finite(key, value)
            return value
    if str in kinds:
        return text
    if bool in kinds and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if not {int, float, bool} & set(kinds):
        raise RecipeError(f"option {key!r} of recipe {name!r} has parts; write the recipe as TOML")
    if "@" in text:
        raise RecipeError(
            f'{key}={text!r}: spell layers as in "kivi@first 2=full" or "kivi@0-2=full@5=full"'
        )
    expected = "true or false" if bool in kinds else "a whole number"
    expected = "a number" if float in kinds else expected
    raise RecipeError(f"option {key!r} of recipe {name!r} must be {expected}, not {text!r}")


def _nearest(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
