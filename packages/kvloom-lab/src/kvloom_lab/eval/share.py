"""Give a recipe the budget at which its cache really takes a share of the exact cache's bytes."""

from __future__ import annotations

from dataclasses import replace

from kvloom.errors import RecipeError
from kvloom.recipe import Geometry, Recipe


def at_share(recipe: Recipe, share: float, tokens: int, geometry: Geometry) -> Recipe:
    """Return the recipe with the largest budget whose bytes are at most this share.

    tokens: of the context that is compressed. share: 0 to 1, of the bytes of an exact cache after
    it. A recipe whose budget does not change its bytes (none, or recall's) is returned as it is.
    The name says the share. Raises `RecipeError` if no budget is small enough.
    """
    if recipe.keep is None or recipe.recall is not None:
        return recipe
    most = share * tokens * geometry.token_nbytes()
    fits = 0
    low, high = 1, tokens
    while low <= high:
        middle = (low + high) // 2
        try:
            size = recipe.with_budget(middle).nbytes(tokens, geometry)
        except RecipeError:  # too small for the recipe's window, say
            low = middle + 1
            continue
        if size <= most:
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    if not fits:
        raise RecipeError(
            f"{recipe.name} has no budget that takes {share:.3g} of the exact cache after {tokens} "
            "tokens; use a larger share, or a longer context"
        )
    return replace(recipe.with_budget(fits), name=f"{recipe.name} at {share:.3g}")
