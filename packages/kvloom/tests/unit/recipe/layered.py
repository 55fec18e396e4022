"""What tests of recipes by layer share."""

from __future__ import annotations

from kvloom.keep import Budget, Keep, Mass
from kvloom.recipe import Recipe
from kvloom.store import Packed, Store

FOUR, TWO = Store(Packed(4, "token"), Packed(4, "token")), Store(Packed(2, "token"))
SNAP = Keep(Budget(tokens=40), Mass(), when="prompt")


def stores(recipe: Recipe, numbers=range(6)) -> list[Store]:
    return [recipe.for_layer(n, numbers).store for n in numbers]
