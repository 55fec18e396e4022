"""Recipes: what they consist of, their names, and the bytes that they take."""

from .geometry import Geometry
from .resolve import ALIASES, RECIPES, options, resolve, summary
from .spec import Protect, Recipe, is_file

__all__ = [
    "ALIASES",
    "RECIPES",
    "Geometry",
    "Protect",
    "Recipe",
    "is_file",
    "options",
    "resolve",
    "summary",
]
