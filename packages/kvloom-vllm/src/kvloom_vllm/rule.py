"""The rule by which vLLM's pages are packed: that of `kvloom.paged`, and vLLM's names in errors."""

from __future__ import annotations

from kvloom import Recipe
from kvloom.errors import IncompatibleRecipe
from kvloom.paged import packed_by_page
from kvloom.recipe import resolve


def paged(recipe: Recipe | str, page: int) -> Recipe:
    """Return the recipe whose cache in transformers packs the same tokens as pages of vLLM.

    page: tokens of a page, vLLM's block size. Raises `ValueError` for a recipe that vLLM's pages
    cannot hold, with the nearest one that they can.
    """
    found = packed_by_page(recipe, page, "vLLM", "--block-size ")
    if all(store.exact for store in found.stores):
        problem = "in vLLM, it packs nothing; leave kvloom out, or use 'near-lossless'"
        raise IncompatibleRecipe(resolve(recipe).name, [problem])
    return found
