"""A prompt's attention in one layer, and what taking it in costs beside.

Taking in is what a cache does once the prompt's own attention is computed: scoring, dropping,
packing, building an index. It is timed alone as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache.layer import LayerCache
from ..recipe.resolve import resolve
from . import caches
from .clock import Side, problem
from .shape import DTYPES, Shape, short

AGAINST = tuple(f"SDPA {short(dtype)}" for dtype in DTYPES.values())  # the shape's runs


def sides(shape: Shape, recipes: Sequence[str], context: int) -> list[Side]:
    """All sides at one prompt length."""
    q, k, v = prompt(shape, context)
    found = [attention(f"SDPA {short(shape.dtype)}", q, k, v)]
    for name in recipes:
        try:
            fresh = _Fresh(name, shape)
        except Exception as error:
            found.append(Side(name, problem=problem(error)))
            continue
        found += [
            Side(name, partial(fresh.attend, q, k, v), fresh.make, fresh.nbytes),
            Side(f"{name}, taking in", partial(fresh.take, q, k, v), fresh.make, fresh.nbytes),
        ]
    return found


def prompt(shape: Shape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: q [B, Hq, tokens, D], k and v [B, Hk, tokens, D]."""
    _, k, v = caches.random(shape, tokens)
    g = torch.Generator().manual_seed(1)
    size = shape.batch, shape.q_heads, tokens, shape.head_dim
    return torch.randn(size, generator=g).to(shape.dtype), k, v


def attention(name: str, q: Tensor, k: Tensor, v: Tensor) -> Side:
    """A prompt's attention alone, by torch's SDPA."""
    gqa = q.shape[1] != k.shape[1]
    return Side(
        name,
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
        held=lambda: k.nbytes + v.nbytes,
    )


class _Fresh:
    """An empty cache a call."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.recipe, self.shape = resolve(name), shape
        self.make()

    def make(self) -> None:
        self.cache: LayerCache = caches.layers(self.recipe, self.shape)[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cache.attend(q, k, v, scale=q.shape[3] ** -0.5)

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        caches.fill(self.cache, q, k, v)

    def nbytes(self) -> int:
        return self.cache.nbytes
