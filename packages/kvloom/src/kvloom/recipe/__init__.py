"""Recipes: their parts, their names and spelling, and the bytes that they take."""

from .geometry import Geometry, SlidingLayer
from .layers import UNCHANGED, listed
from .named import RECIPES, register_recipe
from .parts import BudgetGroup, LayerOverride, Protect, Tuned
from .predict import predicted_layer_nbytes
from .resolve import options, part_options, resolve, summary
from .role import Role
from .spec import Recipe
from .text import is_file

__all__ = [
    "RECIPES",
    "UNCHANGED",
    "BudgetGroup",
    "Geometry",
    "LayerOverride",
    "Protect",
    "Recipe",
    "Role",
    "SlidingLayer",
    "Tuned",
    "is_file",
    "listed",
    "options",
    "part_options",
    "predicted_layer_nbytes",
    "register_recipe",
    "resolve",
    "summary",
]
