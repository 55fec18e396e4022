"""The named recipes, and the compact spelling "name:option=value,option=value"."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from ..errors import RecipeError
from .named.evict import h2o, keyformer, pyramidkv, random, snapkv
from .named.exact import full
from .named.kivi import kivi, kivi_4
from .named.minikv import minikv, minikv_pyramid, minikv_snap
from .named.recall import clusterkv, clusterkv_2bit, quest, topk
from .named.rptq import rptq
from .named.rtn import rtn
from .named.skvq import skvq, skvq_k2v1_5
from .named.smoothquant import smoothquant
from .named.turbo import turbo
from .named.window import dilated, streaming, window
from .spec import Recipe, is_file

RECIPES: dict[str, Callable[..., Recipe]] = {
    "full": full,
    "clusterkv": clusterkv,
    "clusterkv-2bit": clusterkv_2bit,
    "dilated": dilated,
    "h2o": h2o,
    "keyformer": keyformer,
    "kivi": kivi,
    "kivi-4": kivi_4,
    "minikv": minikv,
    "minikv-pyramid": minikv_pyramid,
    "minikv-snap": minikv_snap,
    "pyramidkv": pyramidkv,
    "quest": quest,
    "random": random,
    "rptq": rptq,
    "rtn": rtn,
    "skvq": skvq,
    "skvq-k2v1.5": skvq_k2v1_5,
    "smoothquant": smoothquant,
    "snapkv": snapkv,
    "streaming": streaming,
    "topk": topk,
    "turbo": turbo,
    "window": window,
}
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
ALIASES = {"kivi-2": "kivi"}


def resolve(recipe: Recipe | str | Path) -> Recipe:
    """Return the recipe that this is, names, or is the path of.

    recipe: a `Recipe`, which is returned as it is; the name of one, with options or without
    ("kivi", "kivi:group=64,residual=64"); or a TOML file ("recipe.toml"), see `recipe.is_file`. A
    file with the name of a recipe needs a folder in front ("./kivi"). The result is called what the
    caller called it. Raises `RecipeError` for an unknown name, option or value, and for a file
    without a recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):
        raise RecipeError(
            f"expected a Recipe, its name or its TOML file, got {type(recipe).__name__}"
        )
    name, _, rest = str(recipe).partition(":")
    name = ALIASES.get(name.strip(), name.strip())
    if isinstance(recipe, Path) or (name not in RECIPES and is_file(recipe)):
        return replace(Recipe.from_toml(recipe), name=str(recipe))
    if name not in RECIPES:
        raise RecipeError(
            f"no recipe named {name!r}{_nearest(name, RECIPES)}; there are {', '.join(RECIPES)}"
        )
    build = RECIPES[name]
    options = dict(_option(name, build, item) for item in rest.split(",") if item.strip())
    return replace(build(**options), name=str(recipe))


def summary(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(RECIPES[name]) or "").splitlines()[0]


def options(name: str) -> dict[str, Any]:
    """The options of a recipe and their defaults."""
    return {p.name: p.default for p in inspect.signature(RECIPES[name]).parameters.values()}


def _option(name: str, build: Callable[..., Recipe], item: str) -> tuple[str, Any]:
    key, equals, text = (part.strip() for part in item.partition("="))
    allowed = options(name)
    if key not in allowed:
        has = f"it has {', '.join(allowed)}" if allowed else "it has no options"
        raise RecipeError(f"recipe {name!r} has no option {key!r}{_nearest(key, allowed)}; {has}")
    if not equals or not text:
        raise RecipeError(f"option {key!r} of recipe {name!r} needs a value: {key}=…")
    hint = str(get_type_hints(build)[key])
    for kind, convert in (("int", int), ("float", float)):
        if kind in hint:
            try:
                return key, convert(text)
            except ValueError:
                continue
    if "str" in hint:
        return key, text
    if "bool" in hint and text.lower() in _TRUTH:
        return key, _TRUTH[text.lower()]
    expected = "true or false" if "bool" in hint else "a whole number"
    expected = "a number" if "float" in hint else expected
    raise RecipeError(f"option {key!r} of recipe {name!r} must be {expected}, not {text!r}")


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
