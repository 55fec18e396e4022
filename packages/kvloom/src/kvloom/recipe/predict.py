"""The bytes that a cache has right after a prompt, from the recipe of one layer and a geometry."""

from __future__ import annotations

from .geometry import Geometry
from .parts import AnyRecipe

_INDEX = 4  # bytes of an int32 position, and of a score in fp32
_SPAN = 16  # bytes of the first token and of the number of tokens of a head


def predicted_layer_nbytes(
    recipe: AnyRecipe, tokens: int, g: Geometry, place: int, count: int
) -> int:
    """Return the bytes that one row has in one layer with this plain recipe.

    place, count: the layer's place among the `count` layers that share its budget.
    """
    keep, sinks = recipe.keep, recipe.protect.sinks
    if recipe.compress_after and tokens <= recipe.compress_after:
        # sinks that are stored by themselves have room for all of them
        in_blocks = keep is not None and keep.block is not None
        separate_sinks = sinks if keep is None or keep.by_age or in_blocks else 0
        stored = max(tokens, separate_sinks) * g.layer_token_nbytes()
        queries = tokens * g.q_heads * g.query_dim * g.dtype.itemsize
        outliers = recipe.protect.outliers
        by_ids = recipe.protect.reads_ids or (outliers is not None and outliers.reads_ids)
        ids = 8 * tokens if by_ids else 0
        read = queries if recipe.reads_queries else 0
        read += 4 * tokens if recipe.uses_input_norms else 0
        return stored + read + (8 if separate_sinks or in_blocks else 0) + ids
    if keep is None or keep.by_age:
        kept = tokens
        if keep is not None and keep.drops(tokens):
            kept = min(tokens, recipe.budget_tokens(tokens))
        body = kept - min(sinks, kept)
        total = predicted_token_nbytes(recipe, body, g)
        total += sinks * g.layer_token_nbytes()
        total += 8 if sinks else 0  # the position of the row's first token that is not padding
        return total + g.kv_heads * _predict_index(recipe, body, 0, g)
    if keep.block is not None:
        return _predict_blocks(recipe, tokens, g)
    room = keep.layer_tokens(tokens, count)[place]
    kept = min(tokens, room) if keep.drops(tokens) else tokens
    equal, contested = keep.head_shares(tokens, kept, g.kv_heads, recipe.store.block_tokens)
    total = predicted_token_nbytes(recipe, equal, g)
    total += _predict_ragged(recipe, contested, g)
    total += g.kv_heads * _predict_index(recipe, kept, recipe.pinned_prefix, g)
    if keep.when == "step" and room <= tokens:
        return total + g.kv_heads * _predict_slots(kept, g)
    scored, placed = keep.when != "prompt", g.alibi or recipe.store.pre_rope
    numbers = scored + (kept < tokens and (scored or placed))  # a score, and a position
    return total + g.kv_heads * _INDEX * kept * numbers


def _predict_blocks(recipe: AnyRecipe, tokens: int, g: Geometry) -> int:
    """Return the bytes of one layer that evicts from blocks: see `cache.block_evictor`."""
    keep, sinks, unit = recipe.keep, recipe.protect.sinks, recipe.store.block_tokens
    assert keep is not None
    stored = max(0, tokens - sinks)
    count, granted = keep.first_block(tokens, sinks, stored, g.kv_heads, unit)
    total = predicted_token_nbytes(recipe, stored - count, g)
    total += sinks * g.layer_token_nbytes() + 8  # and where the row begins
    return total + _predict_ragged(recipe, granted, g)


def predicted_token_nbytes(recipe: AnyRecipe, tokens: int, g: Geometry, expired: int = 0) -> int:
    """Return the bytes of keys and values of `tokens` tokens, packed and exact, and outliers.

    expired: the oldest of these, packed ones, that are dropped again.
    """
    total, packed_in_both = 0, tokens
    for (fmt, recent), d in zip(recipe.formats_and_recents, g.dims, strict=True):
        packed = 0 if fmt is None else fmt.to_pack(tokens, recent) - expired
        total += (tokens - expired - packed) * g.kv_heads * d * g.dtype.itemsize
        if fmt is not None:
            total += fmt.nbytes(packed, d, g.kv_heads)
            packed_in_both = min(packed_in_both, packed)
    if recipe.protect.outliers is not None:  # exact copies and their positions
        copies = min(recipe.protect.outliers.tokens, packed_in_both)
        total += copies * (g.layer_token_nbytes() + g.kv_heads * _INDEX)
    return total


def _predict_ragged(recipe: AnyRecipe, tokens: int, g: Geometry) -> int:
    """Return the bytes of `tokens` tokens of all heads together, and of each head's span."""
    if not tokens:
        return 0
    total = sum(
        tokens * d * g.dtype.itemsize if fmt is None else fmt.nbytes(tokens, d)
        for (fmt, _), d in zip(recipe.formats_and_recents, g.dims, strict=True)
    )
    return total + g.kv_heads * _SPAN


def _predict_index(recipe: AnyRecipe, tokens: int, prefix: int, g: Geometry) -> int:
    """Return the bytes of one head's index of `tokens` tokens without the first `prefix`."""
    if recipe.recall is None:
        return 0
    ready = tokens - max(recipe.protect.exact_recents)
    for fmt, recent in recipe.formats_and_recents:
        ready = ready if fmt is None else min(ready, fmt.to_pack(tokens, recent))
    if recipe.recall.tier is not None:
        ready = ready // recipe.store.block_tokens * recipe.store.block_tokens
    index = recipe.recall.index
    return index.nbytes(index.due(0, max(0, ready - prefix)), g.query_dim, g.dtype.itemsize)


def _predict_slots(room: int, g: Geometry) -> int:
    """Return the bytes of one head's slots beside its tokens: a free slot, scores, positions."""
    free = sum(g.dims) * g.dtype.itemsize
    return free + (room + 1) * (_INDEX + _INDEX) + 8
