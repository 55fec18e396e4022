"""kvloom's caches, filled to a depth without computing a prompt.

Keys, values and the queries that scores need are random: the speed of a cache does not depend on
their values. The calibration of a layer (groups, clip factors, ranges) is random too. A layer
stores tokens as it does after a prompt's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvloom import Cache, Recipe
from kvloom.cache import LayerCache, build_layers, fill
from kvloom.positions import Rope
from kvloom.store import LayerMetadata, random_metadata

from .shapes import LayerShape

# Queries at the end of the prompt that scores are computed from, as in SnapKV's observation window.
_QUERIES = 64


def random_qkv(shape: LayerShape, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q [B, Hq, min(tokens, 64), D], and k and v [B, Hk, tokens, D]."""
    g = torch.Generator().manual_seed(seed)
    b, d = shape.batch, shape.head_dim
    sizes = ((shape.q_heads, min(tokens, _QUERIES)), (shape.kv_heads, tokens))
    q, k = (torch.randn(b, h, n, d, generator=g).to(shape.dtype) for h, n in sizes)
    return q, k, torch.randn(k.shape, generator=g).to(shape.dtype)


def empty_layers(recipe: Recipe, shape: LayerShape, count: int = 1) -> list[LayerCache]:
    """Return empty caches of `count` layers; raises `IncompatibleRecipe` if the recipe cannot fit.

    A single layer comes after the layers that the recipe leaves exact.
    """
    recipe.check(shape.geometry)
    metadata = random_calibration(recipe, shape)
    before = recipe.recall.full_layers if recipe.recall is not None and count == 1 else 0
    total = before + count
    return build_layers(recipe, range(total), [metadata] * total, metadata.rope)[before:]


def random_calibration(recipe: Recipe, shape: LayerShape) -> LayerMetadata:
    """Return what the formats of a recipe need of a layer, with random numbers."""
    rope = Rope(10000.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    return random_metadata(recipe.store, shape.kv_heads, shape.head_dim, rope)


def filled_cache(model: Any, recipe: Recipe, shape: LayerShape, tokens: int) -> Cache:
    """Return a filled `kvloom.Cache` of a Llama."""
    q, k, v = random_qkv(shape, tokens)
    cache = Cache(model, "full")
    layers = empty_layers(recipe, shape, len(cache.routed))
    for routed, layer in zip(cache.routed, layers, strict=True):
        routed.cache = layer
        fill(layer, q, k, v)
    return cache
