"""Layers with random content: the shape of a benchmark, and caches filled without a prompt.

Keys, values, calibrations and the queries that scores need are random: the speed of a cache does
not depend on their values. A layer stores tokens as it does after a prompt's attention. An
impossible shape raises `InputError` before anything is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvloom import Cache, Recipe
from kvloom.cache import LayerCache, build_layers, fill
from kvloom.errors import InputError
from kvloom.positions import Rope
from kvloom.recipe import Geometry
from kvloom.store import LayerFacts, random_layer_facts

from .errors import check_least

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LayerShape:
    """The attention of one layer. Raises `InputError` for an impossible shape."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    layers = 1

    def __post_init__(self) -> None:
        names = ("q_heads", "kv_heads", "head_dim", "batch")
        check_least(1, **{name: getattr(self, name) for name in names})
        if self.head_dim % 2:
            raise InputError(
                f"head_dim={self.head_dim} is odd, and RoPE rotates pairs of channels; use "
                f"{self.head_dim + 1}"
            )
        if self.q_heads % self.kv_heads:
            raise InputError(
                f"{self.q_heads} query heads cannot share {self.kv_heads} key/value heads; give "
                "a multiple, such as --heads 32/8"
            )

    def __str__(self) -> str:
        return f"{self.q_heads}q/{self.kv_heads}kv x {self.head_dim}"

    @property
    def geometry(self) -> Geometry:
        """The geometry of a model with such layers."""
        return Geometry(self.layers, self.q_heads, self.kv_heads, self.head_dim, self.dtype)


@dataclass(frozen=True)
class ModelShape(LayerShape):
    """A Llama with such layers."""

    head_dim: int = 64
    layers: int = 8
    hidden: int = 2048
    intermediate: int = 8192
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("layers", "hidden", "intermediate", "vocabulary")
        check_least(1, **{name: getattr(self, name) for name in names})
        if self.hidden % self.q_heads:
            raise InputError(
                f"hidden={self.hidden} is not a multiple of {self.q_heads} query heads, as Llama "
                f"requires; use {self.q_heads * max(1, self.hidden // self.q_heads)}"
            )

    def __str__(self) -> str:
        return f"{self.layers} layers, hidden {self.hidden}, {super().__str__()}"


def short_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in tables: bf16, fp16 or fp32."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


# Queries at the end of the prompt that scores are computed from, as in SnapKV's observation window.
_QUERIES = 64


def random_qkv(shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q [B, Hq, min(tokens, 64), D], and k and v [B, Hk, tokens, D]."""
    g = torch.Generator().manual_seed(0)
    b, d = shape.batch, shape.head_dim
    sizes = ((shape.q_heads, min(tokens, _QUERIES)), (shape.kv_heads, tokens))
    q, k = (torch.randn(b, h, n, d, generator=g).to(shape.dtype) for h, n in sizes)
    return q, k, torch.randn(k.shape, generator=g).to(shape.dtype)


def empty_layers(recipe: Recipe, shape: LayerShape, count: int = 1) -> list[LayerCache]:
    """Return empty caches of `count` layers; raises `IncompatibleRecipe` if the recipe cannot fit.

    A single layer comes after the layers that the recipe leaves exact.
    """
    recipe.check(shape.geometry)
    before = recipe.recall.full_layers if recipe.recall is not None and count == 1 else 0
    layers = range(before + count)
    facts = [random_calibration(recipe.for_layer(i, layers), shape) for i in layers]
    return build_layers(recipe, layers, facts, [x.rope for x in facts])[before:]


def random_calibration(recipe: Recipe, shape: LayerShape) -> LayerFacts:
    """Return what the formats of a recipe need of a layer, with random numbers."""
    rope = Rope(10000.0 ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
    return random_layer_facts(recipe.store, shape.kv_heads, shape.head_dim, rope)


def filled_cache(model: Any, recipe: Recipe, shape: LayerShape, tokens: int) -> Cache:
    """Return a filled `kvloom.Cache` of a Llama."""
    q, k, v = random_qkv(shape, tokens)
    cache = Cache(model, "full")
    layers = empty_layers(recipe, shape, len(cache.full_layers))
    for routed, layer in zip(cache.full_layers, layers, strict=True):
        routed.cache = layer
        fill(layer, q, k, v)
    return cache
