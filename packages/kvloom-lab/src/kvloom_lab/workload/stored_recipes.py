"""Tuned recipes in kvloom's cache folder, in one folder for each model's weights.

`kvloom tune` writes them; `kvloom_lab.auto` reads them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvloom.errors import InputError, RecipeError
from kvloom.recipe import Recipe

from ..models.smollm2 import cache_folder
from . import whole_file


def write(recipe: Recipe) -> Path:
    """Write a tuned recipe, completely or not at all, and return its file.

    A recipe for the same text, context and bound is replaced. Raises `InputError` if the file
    cannot be written.
    """
    tuned = recipe.tuned
    assert tuned is not None, "only tuned recipes are stored"
    target = _folder(tuned.model) / f"{tuned.bound}-{tuned.context}-{tuned.text[:8]}.toml"
    try:
        whole_file.write(target, recipe.to_toml())
    except OSError as error:
        raise InputError(
            f"the tuned recipe cannot be written to {target}: {error.strerror}; its scores are "
            "kept: set XDG_CACHE_HOME to a folder that can be written, and run the same again"
        ) from error
    return target


def read(weights: str) -> list[Recipe]:
    """Return the recipes that were tuned for a model, named by their files.

    weights: the fingerprint, as in `Tuned.model`. Raises `InputError` for a damaged file.
    """
    found = []
    for path in sorted(_folder(weights).glob("*.toml")):
        try:
            recipe = Recipe.from_toml(path)
        except RecipeError as error:
            raise InputError(f"the stored recipe {path} is damaged: {error}; remove it") from error
        if recipe.tuned is not None and recipe.tuned.model == weights:
            found.append(replace(recipe, name=str(path)))
    return found


def _folder(weights: str) -> Path:
    return cache_folder() / "tuned" / weights
