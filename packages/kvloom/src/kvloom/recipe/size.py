"""Predicted bytes: what a cache holds right after a prompt, from the recipe and the geometry.

Decides nothing: these are pure functions, and tests compare them with measured bytes. The `nbytes`
of a cache and of its parts are the bytes of tensors that exist; those of a recipe, a format and an
index are predicted, and take a number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .geometry import Geometry

if TYPE_CHECKING:
    from .spec import Recipe

_INDEX = 4  # bytes of an int32 position, and of a score in fp32
_SPAN = 16  # bytes of the first token and of the number of tokens of a head


def predicted_nbytes(recipe: Recipe, tokens: int, geometry: Geometry, batch: int = 1) -> int:
    """Return the bytes of all layers after a prompt of `tokens` tokens; see `Recipe.nbytes`."""
    numbers = geometry.numbers
    rows = (
        predicted_layer_nbytes(recipe.for_layer(number, numbers), tokens, geometry, *budget_rank)
        for number, budget_rank in zip(numbers, recipe.budget_ranks(numbers), strict=True)
    )
    return sum(rows) * batch


def predicted_layer_nbytes(
    recipe: Recipe, tokens: int, g: Geometry, rank: int = 0, count: int = 1
) -> int:
    """Return the bytes that one row has in one layer with this plain recipe.

    rank, count: the layer's rank among the `count` layers that share its budget.
    """
    keep, sinks = recipe.keep, recipe.protect.sinks
    if recipe.start and tokens <= recipe.start:
        heads = 2 * g.kv_heads + (g.q_heads if recipe.reads_queries else 0)
        apart = sinks if keep is None or keep.by_age else 0  # sinks have room for all of them
        rows = tokens * heads + 2 * g.kv_heads * max(0, apart - tokens)
        outliers = recipe.protect.outliers
        ids = 8 * tokens if outliers is not None and outliers.reads_ids else 0
        return rows * g.head_dim * g.dtype.itemsize + (8 if apart else 0) + ids
    if keep is None or keep.by_age:
        kept = tokens
        if keep is not None and keep.drops(tokens):
            kept = min(tokens, recipe.budget_tokens(tokens))
        body = kept - min(sinks, kept)
        total = _predict_tokens(recipe, body, g)
        total += 2 * sinks * g.kv_heads * g.head_dim * g.dtype.itemsize
        total += 8 if sinks else 0  # the position of the row's first token that is not padding
        return total + g.kv_heads * _predict_index(recipe, body, 0, g)
    room = keep.rooms(tokens, count)[rank]
    kept = min(tokens, room) if keep.drops(tokens) else tokens
    equal, contested = keep.head_shares(tokens, kept, g.kv_heads, recipe.store.block_tokens)
    total = _predict_tokens(recipe, equal, g)
    total += _predict_ragged(recipe, contested, g)
    total += g.kv_heads * _predict_index(recipe, kept, recipe.pinned_prefix, g)
    if keep.when == "step" and room <= tokens:
        return total + g.kv_heads * _predict_slots(kept, g)
    scored, placed = keep.when != "prompt", g.alibi or recipe.store.pre_rope
    numbers = scored + (kept < tokens and (scored or placed))  # a score, and a position
    return total + g.kv_heads * _INDEX * kept * numbers


def _predict_tokens(recipe: Recipe, tokens: int, g: Geometry) -> int:
    """Return the bytes of keys and values of `tokens` tokens, packed and exact, and outliers."""
    total, packed_in_both = 0, tokens
    for fmt, recent in _sides(recipe):
        packed = 0 if fmt is None else fmt.to_pack(tokens, recent)
        total += (tokens - packed) * g.kv_heads * g.head_dim * g.dtype.itemsize
        if fmt is not None:
            total += fmt.nbytes(packed, g.head_dim, g.kv_heads)
            packed_in_both = min(packed_in_both, packed)
    if recipe.protect.outliers is not None:  # exact copies and their positions
        copies = min(recipe.protect.outliers.tokens, packed_in_both)
        total += copies * g.kv_heads * (2 * g.head_dim * g.dtype.itemsize + _INDEX)
    return total


def _predict_ragged(recipe: Recipe, tokens: int, g: Geometry) -> int:
    """Return the bytes of `tokens` tokens of all heads together, and of each head's span."""
    if not tokens:
        return 0
    exact = tokens * g.head_dim * g.dtype.itemsize
    total = sum(
        exact if fmt is None else fmt.nbytes(tokens, g.head_dim) for fmt, _ in _sides(recipe)
    )
    return total + g.kv_heads * _SPAN


def _predict_index(recipe: Recipe, tokens: int, prefix: int, g: Geometry) -> int:
    """Return the bytes of one head's index of `tokens` tokens without the first `prefix`."""
    if recipe.recall is None:
        return 0
    ready = tokens - max(recipe.protect.recents)
    for fmt, recent in _sides(recipe):
        ready = ready if fmt is None else min(ready, fmt.to_pack(tokens, recent))
    if recipe.recall.tier is not None:
        ready = ready // recipe.store.block_tokens * recipe.store.block_tokens
    index = recipe.recall.index
    return index.nbytes(index.due(0, max(0, ready - prefix)), g.head_dim, g.dtype.itemsize)


def _predict_slots(room: int, g: Geometry) -> int:
    """Return the bytes of one head's slots beside its tokens: a free slot, scores, positions."""
    free = 2 * g.head_dim * g.dtype.itemsize
    return free + (room + 1) * (_INDEX + _INDEX) + 8


def _sides(recipe: Recipe) -> list:
    """Return (format, recent exact tokens) of keys and of values."""
    store = recipe.store
    return list(zip((store.keys, store.values), recipe.protect.recents, strict=True))
