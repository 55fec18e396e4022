"""Caches filled to a depth without computing a prompt.

Keys, values and the few queries that scores ask for are random: a cache's speed does not depend on
what they say. What a format must know of a layer's channels (groups, clip factors, ranges) is made
up in the same way. kvloom's layers take tokens in as they do after a prompt's attention;
transformers' through their own `update`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from ..cache.build import coordinate
from ..cache.layer import LayerCache
from ..hf.cache import Cache
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import LayerMetadata, Packed
from ..store.codec import Channels, consecutive
from .shape import Shape

# Queries that scores are made of: as many as SnapKV's window and its like ask for.
_QUERIES = 64

STOCK = {
    "DynamicCache": "",
    "QuantizedCache quanto-4": "optimum-quanto",
    "QuantizedCache hqq-4": "hqq",
    "QuantizedCache fp8": "-U transformers",
}
"""The caches of transformers, and what `pip install` takes where one is missing."""


def random(shape: Shape, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: q [B, Hq, min(tokens, 64), D], k and v [B, Hk, tokens, D]."""
    g = torch.Generator().manual_seed(seed)
    b, d = shape.batch, shape.head_dim
    sizes = ((shape.q_heads, min(tokens, _QUERIES)), (shape.kv_heads, tokens))
    q, k = (torch.randn(b, h, n, d, generator=g).to(shape.dtype) for h, n in sizes)
    return q, k, torch.randn(k.shape, generator=g).to(shape.dtype)


def layers(recipe: Recipe, shape: Shape, count: int = 1) -> list[LayerCache]:
    """Empty caches of `count` layers; raises `IncompatibleRecipe` if the recipe does not fit.

    One layer alone stands behind those that a recipe leaves as they are.
    """
    recipe.check(shape.geometry)
    rope = Rope(10000.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    packed = recipe.store.quantized
    keys, values = packed.get("keys"), packed.get("values")
    metadata = LayerMetadata(_channels(keys, shape), _channels(values, shape), rope)
    moves = recipe.keep is not None and recipe.keep.positions != "original"
    before = recipe.recall.full_layers if recipe.recall is not None and count == 1 else 0
    built = [
        LayerCache(
            recipe, f"layer {i}", (i + before, count + before), rope if moves else None, metadata
        )
        for i in range(count)
    ]
    coordinate(built)
    return built


def fill(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Take in a prompt k, v [B, Hk, N, D] of which q [B, Hq, T, D] are the last queries."""
    cache.prefill(q, k, v, scale=k.shape[3] ** -0.5)
    cache.end_step()


def ours(model: Any, recipe: Recipe, shape: Shape, tokens: int) -> Cache:
    """A `kvloom.Cache` of a Llama, filled."""
    q, k, v = random(shape, tokens)
    cache = Cache(model, "full")
    for routed, layer in zip(cache.routed, layers(recipe, shape, len(cache.routed)), strict=True):
        routed.cache = layer
        fill(layer, q, k, v)
    return cache


def stock(name: str, config: Any, k: Tensor, v: Tensor) -> transformers.Cache:
    """A cache of transformers by its name in `STOCK`, every layer filled with k, v.

    Raises `ImportError` or `ValueError` where this installation has none.
    """
    if name == "DynamicCache":
        cache: Any = transformers.DynamicCache(config=config)
    else:
        backend, _, bits = name.split()[1].partition("-")
        axis = 1 if backend == "hqq" else 0
        options = {"nbits": int(bits), "axis_key": axis, "axis_value": axis} if bits else {}
        cache = transformers.QuantizedCache(backend, config=config, **options)
    for i in range(config.num_hidden_layers):
        cache.update(k, v, i)
    return cache


def missing(name: str, error: Exception) -> str:
    """Why a cache of `STOCK` cannot be had, in a few words with the remedy."""
    if isinstance(error, ImportError):
        return f"not installed: pip install {STOCK[name]}"
    return f"this transformers has none ({error}): pip install {STOCK[name]}"


def nbytes(held: Any) -> int:
    """Bytes of all tensors in a cache of transformers, wherever its layers keep them."""
    if isinstance(held, Tensor):
        if hasattr(held, "__tensor_flatten__"):  # quanto's
            return sum(nbytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
        return held.nbytes
    if isinstance(held, dict):
        return sum(nbytes(x) for x in held.values())
    if isinstance(held, (list, tuple)):
        return sum(nbytes(x) for x in held)
    if isinstance(held, (transformers.Cache, transformers.cache_utils.CacheLayerMixin)):
        return nbytes(vars(held))
    return 0


def read_nbytes(cache: LayerCache) -> int:
    """Bytes that the last step read: all that is held, or the index and what it chose."""
    if cache.retriever is None or not cache.seen:
        return cache.nbytes
    index = cache.retriever.finder.nbytes
    return index + round((cache.nbytes - index) * cache.read / cache.seen)


def _channels(fmt: Packed | None, shape: Shape) -> Channels | None:
    """What a calibrated format could know of a layer."""
    if fmt is None or fmt.transform is None or not fmt.transform.calibrated:
        return None
    g = torch.Generator().manual_seed(0)
    size = shape.kv_heads, shape.head_dim
    group_of = consecutive(fmt.group or shape.head_dim, fmt.transform, *size)
    if fmt.transform.reorder:
        if fmt.transform.span == "layer":
            order = torch.randperm(group_of.numel(), generator=g)
            group_of = group_of.reshape(-1)[order].view(size)
        else:
            order = torch.randn(size, generator=g).argsort(dim=-1)
            group_of = group_of.gather(-1, order)
    groups = int(group_of.max()) + 1
    return Channels(
        group_of,
        torch.full((groups if fmt.transform.clip == "group" else 1,), 0.95)
        if isinstance(fmt.transform.clip, str)
        else None,
        torch.ones(size) if fmt.transform.smooth else None,
        torch.full((groups,), -4.0) if fmt.transform.static else None,
        torch.full((groups,), 4.0) if fmt.transform.static else None,
    )
