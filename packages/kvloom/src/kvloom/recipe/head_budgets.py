"""What a recipe whose heads divide a budget by their scores cannot have, and models without it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import RecipeError
from ..store import Packed, Store
from .geometry import Geometry

if TYPE_CHECKING:
    from .spec import Recipe


def check(plain: Iterable[Recipe]) -> None:
    """Raise `RecipeError` for parts that do not combine with heads of different lengths.

    plain: the recipe without overrides, and with each of them.
    """
    for one in plain:
        if one.keep is None or one.keep.budget.heads is None:
            continue
        heads = f"heads={one.keep.budget.heads:g}"
        if one.recall is not None:
            raise RecipeError(
                f"{heads} leaves heads with different numbers of tokens, and recall reads equal "
                "numbers; leave one of the two out"
            )
        _check_store(one.store, heads)


def _check_store(store: Store, heads: str) -> None:
    for side, fmt in store.sides.items():
        if not isinstance(fmt, Packed):
            raise RecipeError(
                f"{side}: {heads} takes tokens of kvloom's own format, not of {fmt.kind!r}; leave "
                "out heads, or use Packed"
            )
        if fmt.pre_rope or fmt.regroups:
            raise RecipeError(
                f"{side}: {heads} takes tokens that are packed after RoPE, each head by itself; "
                "leave out pre_rope, span, reorder, clip, smooth and static, or leave out heads"
            )


def problems(recipe: Recipe, geometry: Geometry) -> list[str]:
    """Return why a model cannot have budgets that depend on the scores of all heads."""
    keep = recipe.keep
    problems: list[str] = []
    if keep is None or not keep.needs_all_heads:
        return problems
    given = f"layers={keep.budget.layers!r}"
    if keep.budget.heads is not None:
        given = f"heads={keep.budget.heads:g}"
    if geometry.ranks > 1:
        problems.append(
            f"{given} divides a budget by the scores of all heads, and this process holds one of "
            f"{geometry.ranks} parts of them (tensor parallelism); use "
            'layers="uniform" or "pyramid", and equal heads (heads=1 in a named recipe)'
        )
    if keep.budget.heads is not None and geometry.alibi:
        problems.append(
            f"{given} leaves heads with different tokens, and the model's attention adds a bias by "
            "their positions (ALiBi); leave out heads, or use heads=1 in a named recipe"
        )
    return problems
