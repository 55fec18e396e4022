"""What recipes that evict share: the store of another named recipe, and budgets per head."""

from __future__ import annotations

from dataclasses import replace

from ...errors import RecipeError
from ..spec import Recipe


def share(heads: float) -> float | None:
    """Return `Budget.heads` of an option heads, of which 1 is the uniform budget."""
    return None if heads == 1 else heads


def stored_as(name: str, recipe: Recipe) -> Recipe:
    """Return `recipe` with the format and the exact recent tokens of the recipe `name`.

    Raises `RecipeError` for a recipe that does more than store.
    """
    from . import RECIPES  # the registry has this recipe's function too

    if name not in RECIPES:
        raise RecipeError(f"store={name!r} is not a recipe; use one that packs, such as kivi-4")
    other = RECIPES[name]()
    if other.keep is not None or other.recall is not None or other.protect.outliers is not None:
        raise RecipeError(
            f"store={name!r} also selects tokens; use a recipe that only packs, such as kivi-4"
        )
    protect = replace(recipe.protect, recent=other.protect.recent)
    return replace(recipe, store=other.store, protect=protect)
