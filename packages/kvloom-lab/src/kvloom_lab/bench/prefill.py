"""One layer's prefill: a prompt's attention, and the cost of storing the prompt.

Storing is what a cache does after the prompt's attention is computed: score, evict, pack, build an
index. It is also timed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kvloom.cache import LayerCache, fill
from kvloom.recipe import resolve

from ..workload import filled_caches
from ..workload.shapes import DTYPES, LayerShape, short_name
from .timing import Candidate, built

BASELINES = tuple(f"SDPA {short_name(dtype)}" for dtype in DTYPES.values())
"""Only the one in the dtype of the shape is measured."""


def candidates(shape: LayerShape, recipes: Sequence[str], context: int) -> list[Candidate]:
    """Return all candidates at one prompt length."""
    q, k, v = random_prompt(shape, context)
    found = [sdpa(f"SDPA {short_name(shape.dtype)}", q, k, v)]
    for name in recipes:
        found += built(name, partial(_recipe, name, shape, q, k, v))
    return found


def _recipe(name: str, shape: LayerShape, q: Tensor, k: Tensor, v: Tensor) -> list[Candidate]:
    layer = _EmptyLayer(name, shape)
    attend, store = partial(layer.attend, q, k, v), partial(layer.store, q, k, v)
    return [
        Candidate(name, attend, layer.renew, layer.nbytes),
        Candidate(f"{name}, storing", store, layer.renew, layer.nbytes),
    ]


def random_prompt(shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q [B, Hq, tokens, D], and k and v [B, Hk, tokens, D]."""
    _, k, v = filled_caches.random_qkv(shape, tokens)
    g = torch.Generator().manual_seed(1)
    size = shape.batch, shape.q_heads, tokens, shape.head_dim
    return torch.randn(size, generator=g).to(shape.dtype), k, v


def sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
    """Return a prompt's attention by torch's SDPA, without a cache."""
    gqa = q.shape[1] != k.shape[1]
    return Candidate(
        name,
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
        kv_bytes=lambda: k.nbytes + v.nbytes,
    )


class _EmptyLayer:
    """A layer's cache that is renewed before every call."""

    def __init__(self, name: str, shape: LayerShape) -> None:
        self.recipe, self.shape = resolve(name), shape
        self.renew()

    def renew(self) -> None:
        self.cache: LayerCache = filled_caches.empty_layers(self.recipe, self.shape)[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cache.attend(q, k, v, scale=q.shape[3] ** -0.5)

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        fill(self.cache, q, k, v)

    def nbytes(self) -> int:
        return self.cache.nbytes
