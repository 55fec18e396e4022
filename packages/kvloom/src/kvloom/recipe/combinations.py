"""Which parts of a recipe do not combine, one check for each part.

Raises `RecipeError` with what does not combine and what to use instead. Problems with a model are
in `model_problems`.
"""

from __future__ import annotations

from ..errors import RecipeError
from ..keep import Keep
from ..keep.policy import FLOOR_TOKENS
from ..recall import Recall
from .parts import AnyRecipe


def check_parts(recipe: AnyRecipe) -> None:
    """Raise `RecipeError` for the first parts that do not combine."""
    if recipe.packs_windows:
        _check_sliding(recipe)
    if recipe.recall is not None:
        _check_recall(recipe, recipe.recall)
    if recipe.protect.outliers is not None and (recipe.keep is not None or recipe.store.exact):
        raise RecipeError(
            "protect.outliers keeps tokens from being packed: combine it with a packed store "
            "and no keep, which has a score of its own"
        )
    if recipe.protect.marks and (recipe.keep is None or recipe.keep.by_age):
        raise RecipeError(
            "ids, ids_except, spans and role of protect keep tokens of a prompt that a score "
            "would evict: use them with a recipe that has a score, such as small or snapkv"
        )
    if recipe.keep is not None:
        _check_keep(recipe, recipe.keep)
    if recipe.repeats_prompt:
        _check_repeats(recipe)


def _check_sliding(recipe: AnyRecipe) -> None:
    """Check what packed windows do not combine with."""
    if recipe.compress_after:
        raise RecipeError(
            f"compress_after={recipe.compress_after} keeps tokens exact that "
            'sliding="packed" packs; leave out one of the two'
        )
    if recipe.store.exact:
        raise RecipeError(
            'sliding="packed" packs windows in the formats of the store, which has none; leave it '
            'out, or use a recipe that packs, such as "near-lossless"'
        )
    if recipe.store.pre_rope or recipe.store.calibrated:
        raise RecipeError(
            'sliding="packed" takes formats without pre_rope and without calibration; leave it '
            "out, or use rtn, kivi or turbo"
        )


def _check_repeats(recipe: AnyRecipe) -> None:
    """Check a recipe for which the model repeats the prompt."""
    if recipe.compress_after:
        raise RecipeError(
            f"compress_after={recipe.compress_after} keeps the prompt exact, and a score that "
            "repeats the prompt needs it in one call; leave out compress_after, "
            "or use another score"
        )
    if any(keep.when != "prompt" for keep in recipe.keeps_by_score):
        raise RecipeError(
            "a score that repeats the prompt in some layers does not allow other layers that "
            'evict by score at every step; use when="prompt" in all of them'
        )


def _check_keep(recipe: AnyRecipe, keep: Keep) -> None:
    """Check a budget, and what eviction does not combine with."""
    if not recipe.store.exact and (not keep.scores_once or keep.by_age):
        raise RecipeError(
            "keep drops single tokens at later steps, and packed tokens cannot leave their "
            'group alone: combine keep with an exact store, or drop by score when="prompt"'
        )
    if keep.fit is not None and recipe.store.pre_rope:
        raise RecipeError("fit reads keys as they are stored after RoPE: leave out pre_rope")
    tokens, sinks = keep.budget.tokens, recipe.protect.sinks
    protected = recipe.protect.tokens if keep.by_age else sinks
    if tokens is None and not keep.by_age and sinks >= FLOOR_TOKENS:
        raise RecipeError(
            f"the smallest budget of a fraction is {FLOOR_TOKENS} tokens, which sinks={sinks} "
            "would fill; use fewer sinks, or a budget in tokens"
        )
    if tokens is not None and tokens <= protected:
        raise RecipeError(
            f"a budget of {tokens} tokens leaves nothing beside {protected} protected tokens; "
            f"use {protected + 1} or more"
        )
    unit = recipe.store.block_tokens
    if keep.block is not None and keep.block < unit:
        raise RecipeError(
            f"block={keep.block} is less than the {unit} tokens that the store packs together; use "
            f"{unit} or more"
        )
    if keep.budget.head_share is not None:
        _check_heads(recipe, f"head_share={keep.budget.head_share:g}")


def _check_heads(recipe: AnyRecipe, heads: str) -> None:
    """Check what does not combine with heads of different lengths; heads: as errors say it."""
    if recipe.recall is not None:
        raise RecipeError(
            f"{heads} leaves heads with different numbers of tokens, and recall reads equal "
            "numbers; leave one of the two out"
        )
    for side, fmt in recipe.store.quantized.items():
        if fmt.pre_rope or fmt.regroups:
            raise RecipeError(
                f"{side}: {heads} takes tokens that are packed after RoPE, each head by "
                "itself; leave out pre_rope, span, reorder, clip, smooth and static, or leave "
                "out head_share"
            )


def _check_recall(recipe: AnyRecipe, recall: Recall) -> None:
    """Check what a step that reads a choice of tokens does not combine with."""
    keep = recipe.keep
    if keep is not None and (keep.by_age or keep.when != "prompt"):
        raise RecipeError(
            "recall reads a few tokens of a step, and a keep at every step scores them all and "
            'drops tokens of the index: use a keep by score with when="prompt", or leave one '
            "of the two out"
        )
    if keep is not None and keep.renumbers:
        raise RecipeError(
            f"recall reads tokens at their own positions, not positions={keep.positions!r}; "
            'use "original"'
        )
    if recipe.protect.outliers is not None:
        raise RecipeError("recall reads packed tokens as they are: leave out protect.outliers")
    if recall.tier is not None:
        _check_tier(recipe, recall)
    protected, unit = recipe.always_read, recall.index.unit
    if recall.tokens < protected + unit:
        raise RecipeError(
            f"a budget of {recall.tokens} tokens leaves nothing to find beside {protected} "
            f"protected tokens; use {protected + unit} or more"
        )


def _check_tier(recipe: AnyRecipe, recall: Recall) -> None:
    """Check which formats and indexes a tier takes."""
    for side, fmt in recipe.store.quantized.items():
        if not fmt.plain:
            raise RecipeError(
                f"{side}: a tier takes tokens that are packed after RoPE, each head by "
                "itself, and not rotated; use kivi or rtn without rotate, or leave "
                "out the tier"
            )
    unit, step = recipe.store.block_tokens, recall.index.block_tokens
    if max(unit, step) % min(unit, step):
        raise RecipeError(
            f"the index takes {step} tokens at a time and the tier {unit} packed ones: neither "
            f"is a multiple of the other; let the index take {unit} or {2 * unit} at a time"
        )
