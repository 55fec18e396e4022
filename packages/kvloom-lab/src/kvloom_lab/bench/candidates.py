"""What a benchmark compares: torch without a cache, transformers' caches, and kvloom's recipes.

`decode`: one layer's attention of one query to a long context, and storing its token. `prefill`: a
prompt's attention in one layer, and what a cache does after it (score, evict, pack, index), which
is also timed alone. `pack`: the quantization of a prompt alone; GB/s are of the exact keys and
values. `generate`: whole decode steps of a Llama with random weights; a step reads the weights
once, and what its cache reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvloom.cache import LayerCache, fill, read_nbytes
from kvloom.recipe import Recipe, resolve
from kvloom.store import PromptPacker

from ..workload.layers import (
    DTYPES,
    LayerShape,
    ModelShape,
    empty_layers,
    filled_cache,
    random_calibration,
    random_qkv,
    short_name,
)
from . import transformers_caches
from .timing import Candidate, built

DECODE_BASELINES = ("SDPA fp32", "SDPA bf16", "DynamicCache")
DECODE_PEERS = ("sdpa", *transformers_caches.NAMES)
"""What recipes are compared with, by the names that `--baselines` takes."""


def decode_candidates(
    shape: LayerShape,
    recipes: Sequence[str],
    context: int,
    peers: Sequence[str] = DECODE_PEERS,
    limit_s: float | None = None,
) -> list[Candidate]:
    """Return the candidates at one context, with filled caches.

    peers: some of `PEERS`. limit_s: see `transformers_caches.candidate`.
    """
    q, k, v = random_qkv(shape, context)
    q = q[:, :, -1:]
    candidates = []
    if "sdpa" in peers:
        dtypes = dict.fromkeys((torch.float32, torch.bfloat16, shape.dtype))
        candidates += [_sdpa_step(dtype, q, k, v) for dtype in dtypes]
        if shape.q_heads != shape.kv_heads:
            candidates.append(_sdpa_step(shape.dtype, q, k, v, rows=True))
    caches = [name for peer, name in transformers_caches.NAMES.items() if peer in peers]
    candidates += [_transformers_candidate(name, shape, q, k, v, limit_s) for name in caches]
    for name in recipes:
        candidates += built(name, partial(_decode_recipe, name, shape, context))
    return candidates


def _sdpa_step(
    dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, rows: bool = False
) -> Candidate:
    """Return SDPA. rows: pass the query heads of a group as query rows over the same keys."""
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    name, nbytes = f"SDPA {short_name(dtype)}", k.nbytes + v.nbytes
    if rows:
        name, q = f"{name} rows", q.view(q.shape[0], k.shape[1], -1, q.shape[3])

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return Candidate(name, call, kv_bytes=lambda: nbytes, read_bytes=lambda: nbytes)


def _transformers_candidate(
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


def _decode_recipe(name: str, shape: LayerShape, context: int) -> list[Candidate]:
    q, k, v = random_qkv(shape, context)
    (cache,) = empty_layers(resolve(name), shape)
    with torch.inference_mode():
        fill(cache, q, k, v)
    q, k, v = (x[:, :, -1:].clone() for x in (q, k, v))
    attend = partial(cache.attend, q, k, v, scale=shape.head_dim**-0.5)
    read_bytes = partial(read_nbytes, cache)
    return [Candidate(name, attend, kv_bytes=lambda: cache.nbytes, read_bytes=read_bytes)]


PREFILL_BASELINES = tuple(f"SDPA {short_name(dtype)}" for dtype in DTYPES.values())
"""Only the one in the dtype of the shape is measured."""


def prefill_candidates(shape: LayerShape, recipes: Sequence[str], context: int) -> list[Candidate]:
    """Return all candidates at one prompt length."""
    q, k, v = random_prompt(shape, context)
    candidates = [prompt_sdpa(f"SDPA {short_name(shape.dtype)}", q, k, v)]
    for name in recipes:
        candidates += built(name, partial(_prefill_recipe, name, shape, q, k, v))
    return candidates


def _prefill_recipe(
    name: str, shape: LayerShape, q: Tensor, k: Tensor, v: Tensor
) -> list[Candidate]:
    layer = _EmptyLayer(name, shape)
    attend, store = partial(layer.attend, q, k, v), partial(layer.store, q, k, v)
    return [
        Candidate(name, attend, layer.renew, layer.nbytes),
        Candidate(f"{name}, storing", store, layer.renew, layer.nbytes),
    ]


def random_prompt(shape: LayerShape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q [B, Hq, tokens, D], and k and v [B, Hk, tokens, D]."""
    _, k, v = random_qkv(shape, tokens)
    g = torch.Generator().manual_seed(1)
    size = shape.batch, shape.q_heads, tokens, shape.head_dim
    return torch.randn(size, generator=g).to(shape.dtype), k, v


def prompt_sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Candidate:
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
        self.cache: LayerCache = empty_layers(self.recipe, self.shape)[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.cache.attend(q, k, v, scale=q.shape[3] ** -0.5)

    def store(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        fill(self.cache, q, k, v)

    def nbytes(self) -> int:
        return self.cache.nbytes


PACK_BASELINES = ("the prompt's attention",)


def pack_candidates(shape: LayerShape, recipes: Sequence[str], context: int) -> list[Candidate]:
    """Return all candidates at one prompt length."""
    q, k, v = random_prompt(shape, context)
    candidates = [prompt_sdpa(PACK_BASELINES[0], q, k, v)]
    for name in recipes:
        candidates += built(name, partial(_pack_recipe, name, shape, k, v))
    return candidates


def _pack_recipe(name: str, shape: LayerShape, k: Tensor, v: Tensor) -> list[Candidate]:
    store, nbytes = _EmptyStore(resolve(name), shape), k.nbytes + v.nbytes
    if store.recipe.store.exact:
        return [Candidate(name, problem="it packs nothing")]
    pack = partial(store.pack, k, v)
    return [Candidate(name, pack, store.renew, store.nbytes, lambda: nbytes)]


class _EmptyStore:
    """The store of one layer's keys and values, renewed before every call."""

    def __init__(self, recipe: Recipe, shape: LayerShape) -> None:
        self.recipe, self.shape = recipe, shape
        self.renew()

    def renew(self) -> None:
        metadata = random_calibration(self.recipe, self.shape)
        self.packer = PromptPacker(self.recipe.store, self.recipe.protect.recents, metadata)

    def pack(self, k: Tensor, v: Tensor) -> None:
        self.packer.pack(k, v)

    def nbytes(self) -> int:
        return self.packer.nbytes


PROMPT_COMMANDS = {
    "prefill": (prefill_candidates, PREFILL_BASELINES),
    "pack": (pack_candidates, PACK_BASELINES),
}
"""The candidates of a prompt and their baselines, by command."""
GENERATE_BASELINES = ("DynamicCache",)
GENERATE_PEERS = tuple(transformers_caches.NAMES)
"""What recipes are compared with, by the names that `--baselines` takes."""


def generate_candidates(
    plain: LlamaForCausalLM,
    shape: ModelShape,
    recipes: Sequence[str],
    context: int,
    peers: Sequence[str] = GENERATE_PEERS,
    limit_s: float | None = None,
) -> list[Candidate]:
    """Return the candidates at one context, with filled caches.

    peers: some of `PEERS`. limit_s: see `transformers_caches.candidate`.
    """
    _, k, v = random_qkv(shape, context)
    ids = torch.ones(shape.batch, 1, dtype=torch.long)
    weights = sum(p.nbytes for p in plain.parameters()) - plain.get_input_embeddings().weight.nbytes

    def peer(name: str, cache: Any) -> Candidate:
        nbytes = partial(transformers_caches.nbytes, cache)
        return _step_candidate(name, plain, ids, cache, weights, nbytes, nbytes)

    caches = [name for short, name in transformers_caches.NAMES.items() if short in peers]
    measurable = [
        transformers_caches.candidate(name, plain.config, k, v, partial(peer, name), limit_s)
        for name in caches
    ]
    shared = {id(p): p for p in plain.parameters()}
    routed = copy.deepcopy(plain, shared)  # the same weights, with kvloom's attention

    def recipe(name: str) -> list[Candidate]:
        with torch.no_grad():  # in inference mode, the model's steps could not write to it
            cache = filled_cache(routed, resolve(name), shape, context)
        layers = [layer.cache for layer in cache.routed]
        return [
            _step_candidate(
                name, routed, ids, cache, weights, lambda: cache.nbytes,
                lambda: sum(map(read_nbytes, layers)),
            )
        ]  # fmt: skip

    for name in recipes:
        measurable += built(name, partial(recipe, name))
    return measurable


def _step_candidate(
    name: str,
    model: Any,
    ids: torch.Tensor,
    cache: Any,
    weights: int,
    kv_bytes: Callable[[], int],
    read_kv_bytes: Callable[[], int],
) -> Candidate:
    return Candidate(
        name,
        lambda: model(input_ids=ids, past_key_values=cache, use_cache=True).logits,
        kv_bytes=kv_bytes,
        read_bytes=lambda: weights + read_kv_bytes(),
    )
