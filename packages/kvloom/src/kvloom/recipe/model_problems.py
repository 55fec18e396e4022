"""What in a recipe does not fit a model, one sentence each.

Which parts of a recipe do not combine, whatever the model, is in `combinations`.
"""

from __future__ import annotations

from ..errors import RecipeError
from .geometry import Geometry
from .layers import listed
from .parts import AnyRecipe

WINDOW_DROP = 32
"""Tokens, at least, that a packed window drops at a time."""


def model_problems(recipe: AnyRecipe, geometry: Geometry) -> list[str]:
    """Return everything in a recipe that does not fit the model, one sentence each."""
    packs_windows = recipe.packs_windows and bool(geometry.sliding)
    if packs_windows and (problems := _sliding_problems(recipe, geometry)):
        return problems
    if not geometry.layers and not recipe.exact and not packs_windows:
        return [
            "it would compress nothing, as no layer of the model has plain full attention; use "
            "transformers' own cache, or, for sliding windows, sliding=packed in the recipe"
        ]
    if geometry.latent and (reason := _latent_problem(recipe.without_rotation)):
        return [reason]
    if (adapted := recipe.for_model(geometry)) != recipe:
        return model_problems(adapted, geometry)
    if not recipe.layers:
        return _plain_problems(recipe, geometry, geometry.layers)
    layer_indices = geometry.layer_indices
    layers_of: dict[str, list[int]] = {}
    try:
        for i, (_, count) in zip(layer_indices, recipe.budget_groups(layer_indices), strict=True):
            for problem in _plain_problems(recipe.for_layer(i, layer_indices), geometry, count):
                layers_of.setdefault(problem, []).append(i)
    except RecipeError as error:
        return [str(error)]
    return [
        f"layer{'s' if len(where) > 1 else ''} {listed(where)}: {problem}"
        for problem, where in layers_of.items()
    ]


def _sliding_problems(recipe: AnyRecipe, geometry: Geometry) -> list[str]:
    """Return why windows cannot be packed, one sentence each."""
    layers_of: dict[str, list[int]] = {}
    exact = max(
        recent + (1 if fmt is None else fmt.packed_at_once)
        for fmt, recent in recipe.formats_and_recents
    )
    for layer in geometry.sliding:
        problems = _plain_problems(recipe.in_windows, layer.geometry, 1)
        if layer.window < exact + WINDOW_DROP:
            problems.append(
                f"its window of {layer.window} tokens is too short for the {exact} that may be "
                "exact"
            )
        for problem in [layer.problem] if layer.problem else problems:
            layers_of.setdefault(problem, []).append(layer.layer_index)
    return [
        f'layers {listed(where)}: sliding="packed" does not fit: {problem}; leave it out'
        for problem, where in layers_of.items()
    ]


def _plain_problems(recipe: AnyRecipe, geometry: Geometry, count: int) -> list[str]:
    """Return the problems of a plain recipe whose budget `count` layers share."""
    problems: list[str] = recipe.store.problems(
        geometry.head_dim, geometry.kv_heads, geometry.value_dim
    )
    if recipe.recall is not None and recipe.recall.tier is not None and len({*geometry.dims}) > 1:
        problems.append(
            "a tier takes keys and values with equally many channels, and this model has "
            f"{geometry.dims[0]} and {geometry.dims[1]}; leave out the tier"
        )
    problems += _head_budget_problems(recipe, geometry)
    if recipe.keep is not None and geometry.alibi and not recipe.keep.scorer.supports_alibi:
        problems.append(
            f"score {recipe.keep.scorer.kind!r} moves queries to other positions, and the "
            "model's attention adds a bias by position (ALiBi); use another score, such as mass"
        )
    if recipe.keep is not None and count and recipe.keep.budget.tokens is not None:
        try:  # for a long prompt; the budget of a fraction is not known before the prompt is
            recipe.keep.layer_tokens(1 << 30, count)
        except RecipeError as error:
            problems.append(str(error))
    return problems


def _latent_problem(recipe: AnyRecipe) -> str | None:
    """Return what a recipe has that layers of latents lack; None if they have all of it."""
    if any(store.calibrated for store in recipe.stores):
        return (
            "it needs a calibration of keys and values, and this model stores latents (MLA); use a "
            "format without one, such as turbo"
        )
    if any(keep.needs_rope for keep in recipe.keeps_by_score):
        return (
            "its score rotates queries to later positions, and the queries of latents (MLA) have "
            "parts without a position; use another score, such as observation"
        )
    return None


def _head_budget_problems(recipe: AnyRecipe, geometry: Geometry) -> list[str]:
    """Return why a model cannot have budgets that depend on the scores of all heads."""
    keep = recipe.keep
    problems: list[str] = []
    if keep is None or not keep.needs_all_heads:
        return problems
    option = f"layers={keep.budget.layers!r}"
    if keep.budget.head_share is not None:
        option = f"head_share={keep.budget.head_share:g}"
    if geometry.ranks > 1:
        problems.append(
            f"{option} divides a budget by the scores of all heads, and this process holds one of "
            f"{geometry.ranks} parts of them (tensor parallelism); use "
            'layers="uniform" or "pyramid", and equal heads (head_share=1 in a named recipe)'
        )
    if keep.budget.head_share is not None and geometry.alibi:
        problems.append(
            f"{option} leaves heads with different tokens, and the model's attention adds a bias "
            "by their positions (ALiBi); leave out head_share, or use head_share=1 in "
            "a named recipe"
        )
    return problems
