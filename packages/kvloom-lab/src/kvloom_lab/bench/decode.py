"""One layer's decode step: the attention of one query to a long context, and storing its token.

Decides what is compared: torch's SDPA without a cache, transformers' caches with the attention that
transformers would call, and kvloom's recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvloom.cache import fill, read_nbytes
from kvloom.recipe import resolve

from ..workload import filled_caches
from ..workload.shapes import LayerShape, short_name
from . import transformers_caches
from .timing import Candidate, built

BASELINES = ("SDPA fp32", "SDPA bf16", "DynamicCache")
PEERS = ("sdpa", *transformers_caches.NAMES)
"""What recipes are compared with, by the names that `--baselines` takes."""


def candidates(
    shape: LayerShape,
    recipes: Sequence[str],
    context: int,
    peers: Sequence[str] = PEERS,
    limit_s: float | None = None,
) -> list[Candidate]:
    """Return the candidates at one context, with filled caches.

    peers: some of `PEERS`. limit_s: see `transformers_caches.candidate`.
    """
    q, k, v = filled_caches.random_qkv(shape, context)
    q = q[:, :, -1:]
    found = []
    if "sdpa" in peers:
        dtypes = dict.fromkeys((torch.float32, torch.bfloat16, shape.dtype))
        found += [_sdpa(dtype, q, k, v) for dtype in dtypes]
        if shape.q_heads != shape.kv_heads:
            found.append(_sdpa(shape.dtype, q, k, v, rows=True))
    caches = [name for peer, name in transformers_caches.NAMES.items() if peer in peers]
    found += [_transformers(name, shape, q, k, v, limit_s) for name in caches]
    for name in recipes:
        found += built(name, partial(_recipe, name, shape, context))
    return found


def _sdpa(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, rows: bool = False) -> Candidate:
    """Return SDPA. rows: pass the query heads of a group as query rows over the same keys."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    name, nbytes = f"SDPA {short_name(dtype)}", k.nbytes + v.nbytes
    if rows:
        name, q = f"{name} rows", q.view(q.shape[0], k.shape[1], -1, q.shape[3])

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return Candidate(name, call, kv_bytes=lambda: nbytes, read_bytes=lambda: nbytes)


def _transformers(
    name: str, shape: LayerShape, q: Tensor, k: Tensor, v: Tensor, limit_s: float | None
) -> Candidate:
    config = LlamaConfig(
        num_hidden_layers=1,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.q_heads * shape.head_dim,
    )
    groups = shape.q_heads // shape.kv_heads
    module = SimpleNamespace(num_key_value_groups=groups, is_causal=True, training=False)
    new_k, new_v = k[:, :, -1:], v[:, :, -1:]

    def build(cache: Any) -> Candidate:
        def call() -> object:
            keys, values = cache.update(new_k, new_v, 0)
            scaling = shape.head_dim**-0.5
            return sdpa_attention_forward(module, q, keys, values, None, scaling=scaling)

        nbytes = partial(transformers_caches.nbytes, cache)
        return Candidate(name, call, kv_bytes=nbytes, read_bytes=nbytes)

    return transformers_caches.candidate(name, config, k, v, build, limit_s)


def _recipe(name: str, shape: LayerShape, context: int) -> list[Candidate]:
    q, k, v = filled_caches.random_qkv(shape, context)
    (cache,) = filled_caches.empty_layers(resolve(name), shape)
    with torch.inference_mode():
        fill(cache, q, k, v)
    q, k, v = (x[:, :, -1:].clone() for x in (q, k, v))
    attend = partial(cache.attend, q, k, v, scale=shape.head_dim**-0.5)
    read_bytes = partial(read_nbytes, cache)
    return [Candidate(name, attend, kv_bytes=lambda: cache.nbytes, read_bytes=read_bytes)]
