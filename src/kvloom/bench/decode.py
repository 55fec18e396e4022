"""One layer's decode attention: one query to a long context, and its token taken in.

Decides what stands side by side: torch's SDPA as it is called without a cache, transformers'
caches with the attention that transformers would call, kvloom's recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..cache.layer import LayerCache
from ..recipe.resolve import resolve
from . import caches
from .clock import Side, problem
from .shape import Shape, short

AGAINST = ("SDPA fp32", "SDPA bf16", "DynamicCache")


def sides(shape: Shape, recipes: Sequence[str], context: int) -> list[Side]:
    """All sides at one context, their caches filled."""
    q, k, v = caches.random(shape, context)
    q = q[:, :, -1:]
    dtypes = dict.fromkeys((torch.float32, torch.bfloat16, shape.dtype))
    found = [_sdpa(dtype, q, k, v) for dtype in dtypes]
    if shape.q_heads != shape.kv_heads:
        found.append(_sdpa(shape.dtype, q, k, v, rows=True))
    found += [_stock(name, shape, q, k, v) for name in caches.STOCK]
    return found + [_recipe(recipe, shape, context) for recipe in recipes]


def step(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One decode step: attend, take the token in, drop and pack what is due."""
    return cache.attend(q, k, v, scale=q.shape[3] ** -0.5)


def _sdpa(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, rows: bool = False) -> Side:
    """SDPA; rows: the query heads of a group as rows over the same keys."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    name, nbytes = f"SDPA {short(dtype)}", k.nbytes + v.nbytes
    if rows:
        name, q = f"{name} rows", q.view(q.shape[0], k.shape[1], -1, q.shape[3])

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return Side(name, call, held=lambda: nbytes, read=lambda: nbytes)


def _stock(name: str, shape: Shape, q: Tensor, k: Tensor, v: Tensor) -> Side:
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.q_heads * shape.head_dim,
    )
    try:
        cache = caches.stock(name, config, k, v)
    except (ImportError, ValueError) as error:
        return Side(name, problem=caches.missing(name, error))
    groups = shape.q_heads // shape.kv_heads
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
    new_k, new_v = k[:, :, -1:], v[:, :, -1:]

    def call() -> object:
        keys, values = cache.update(new_k, new_v, 0)
        scaling = shape.head_dim**-0.5
        return sdpa_attention_forward(module, q, keys, values, None, scaling=scaling)

    def held() -> int:
        return caches.nbytes(cache)

    return Side(name, call, held=held, read=held)


def _recipe(name: str, shape: Shape, context: int) -> Side:
    q, k, v = caches.random(shape, context)
    try:
        (cache,) = caches.layers(resolve(name), shape)
        with torch.inference_mode():
            caches.fill(cache, q, k, v)
    except Exception as error:
        return Side(name, problem=problem(error))
    q, k, v = (x[:, :, -1:].clone() for x in (q, k, v))
    return Side(
        name,
        lambda: step(cache, q, k, v),
        held=lambda: cache.nbytes,
        read=lambda: caches.read_nbytes(cache),
    )
