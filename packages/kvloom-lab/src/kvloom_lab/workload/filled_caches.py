"""kvloom's caches, filled to a depth without computing a prompt.

Keys, values and the queries that scores need are random: the speed of a cache does not depend on
their values. The calibration of a layer (groups, clip factors, ranges) is random too. A layer
stores tokens as it does after a prompt's attention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvloom.cache.build import build_layers
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.hf.cache import Cache
from kvloom.positions.rope import Rope
from kvloom.recipe.spec import Recipe
from kvloom.store import Format, LayerEncoding, LayerMetadata, Packed

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
    rope = Rope(10000.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    metadata = LayerMetadata(
        _randomly_calibrated(recipe.store.keys, shape),
        _randomly_calibrated(recipe.store.values, shape),
        rope,
    )
    before = recipe.recall.full_layers if recipe.recall is not None and count == 1 else 0
    total = before + count
    return build_layers(recipe, range(total), [metadata] * total, rope)[before:]


def fill(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Store a prompt k, v [B, Hk, N, D] whose last queries are q [B, Hq, T, D]."""
    queries, tokens = Queries(q, k.shape[3] ** -0.5), k.shape[2]
    cache.prefill(StepInputs(queries, k, v))
    if cache.state.scores_repetition:  # as if the last queries repeated the whole prompt
        first = tokens - q.shape[2]
        cache.repeat(StepInputs(queries, k[:, :, first:], v[:, :, first:]), (0, tokens))
        cache.end_repetition()
    cache.end_step()


def filled_cache(model: Any, recipe: Recipe, shape: LayerShape, tokens: int) -> Cache:
    """Return a filled `kvloom.Cache` of a Llama."""
    q, k, v = random_qkv(shape, tokens)
    cache = Cache(model, "full")
    layers = empty_layers(recipe, shape, len(cache.routed))
    for routed, layer in zip(cache.routed, layers, strict=True):
        routed.cache = layer
        fill(layer, q, k, v)
    return cache


def read_nbytes(cache: LayerCache) -> int:
    """Return the bytes that the last step read: the whole cache, or the index and its selection."""
    retriever, read = cache.state.retriever, cache.state.read
    if retriever is None or not cache.seen:
        return cache.nbytes
    index = retriever.finder.nbytes
    return index + round((cache.nbytes - index) * read / cache.seen)


def _randomly_calibrated(fmt: Format | None, shape: LayerShape) -> LayerEncoding | None:
    """Return a random calibration of a layer; None for a format that needs none."""
    if not isinstance(fmt, Packed) or not fmt.calibrated:
        return None
    g = torch.Generator().manual_seed(0)
    size = shape.kv_heads, shape.head_dim
    group_of = fmt.consecutive(*size)
    if fmt.reorder:
        if fmt.span == "layer":
            order = torch.randperm(group_of.numel(), generator=g)
            group_of = group_of.reshape(-1)[order].view(size)
        else:
            order = torch.randn(size, generator=g).argsort(dim=-1)
            group_of = group_of.gather(-1, order)
    groups = int(group_of.max()) + 1
    return LayerEncoding(
        fmt.encoding,
        *size,
        group_of,
        torch.full((groups if fmt.clip == "group" else 1,), 0.95)
        if isinstance(fmt.clip, str)
        else None,
        torch.ones(size) if fmt.smooth else None,
        torch.full((groups,), -4.0) if fmt.static else None,
        torch.full((groups,), 4.0) if fmt.static else None,
    )
