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
from kvloom.recipe import resolve
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

DECODE_REFERENCES = ("SDPA fp32", "SDPA bf16", "DynamicCache")
DECODE_BASELINES = ("sdpa", *transformers_caches.NAMES)
"""What recipes are compared with, by the names that `--baselines` takes."""


def decode_candidates(
    shape: LayerShape,
    recipes: Sequence[str],
    context: int,
    baselines: Sequence[str] = DECODE_BASELINES,
    limit_s: float | None = None,
) -> list[Candidate]:
    """Return the candidates at one context, with filled caches.

    baselines: some of `DECODE_BASELINES`. limit_s: see `transformers_caches.candidate`.
    """
    q, k, v = random_qkv(shape, context)
    q = q[:, :, -1:]
    candidates = []
    if "sdpa" in baselines:
        dtypes = dict.fromkeys((torch.float32, torch.bfloat16, shape.dtype))
        candidates += [_sdpa_step(dtype, q, k, v) for dtype in dtypes]
        if shape.q_heads != shape.kv_heads:
            candidates.append(_sdpa_step(shape.dtype, q, k, v, rows=True))
    caches = [name for baseline, name in transformers_caches.NAMES.items() if baseline in baselines]
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


PACK_REFERENCE = "the prompt's attention"
PROMPT_REFERENCES = (*(f"SDPA {short_name(dtype)}" for dtype in DTYPES.values()), PACK_REFERENCE)
"""Only those of the command, in the dtype of the shape, are measured."""


def prompt_candidates(
    command: str, shape: LayerShape, recipes: Sequence[str], context: int
) -> list[Candidate]:
    """Return the candidates of `prefill` or `pack` at one prompt length."""
    _, k, v = random_qkv(shape, context)
    g = torch.Generator().manual_seed(1)
    size = shape.batch, shape.q_heads, context, shape.head_dim
    q = torch.randn(size, generator=g).to(shape.dtype)
    baseline = PACK_REFERENCE if command == "pack" else f"SDPA {short_name(shape.dtype)}"
    gqa = shape.q_heads != shape.kv_heads
    candidates = [
        Candidate(
            baseline,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa),
            kv_bytes=lambda: k.nbytes + v.nbytes,
        )
    ]
    of_recipe = _pack_recipe if command == "pack" else _prefill_recipe
    for name in recipes:
        candidates += built(name, partial(of_recipe, name, shape, q, k, v))
    return candidates


def _prefill_recipe(
    name: str, shape: LayerShape, q: Tensor, k: Tensor, v: Tensor
) -> list[Candidate]:
    recipe, scale = resolve(name), shape.head_dim**-0.5

    def make() -> LayerCache:
        return empty_layers(recipe, shape)[0]

    return [
        _renewed(name, make, lambda layer: layer.attend(q, k, v, scale=scale)),
        _renewed(f"{name}, storing", make, lambda layer: fill(layer, q, k, v)),
    ]


def _pack_recipe(name: str, shape: LayerShape, q: Tensor, k: Tensor, v: Tensor) -> list[Candidate]:
    recipe = resolve(name).for_layer(0, range(1))
    if recipe.store.exact:
        return [Candidate(name, problem="it packs nothing")]

    def make() -> PromptPacker:
        facts = random_calibration(recipe, shape)
        return PromptPacker(recipe.store, recipe.protect.exact_recents, facts)

    candidate = _renewed(name, make, lambda packer: packer.pack(k, v))
    candidate.read_bytes = lambda: k.nbytes + v.nbytes
    return [candidate]


def _renewed(name: str, make: Callable[[], Any], call: Callable[[Any], object]) -> Candidate:
    """Return a candidate that works on a new object before every call. make: is not timed."""
    subject = make()

    def prepare() -> None:
        nonlocal subject
        subject = make()

    return Candidate(name, lambda: call(subject), prepare, lambda: subject.nbytes)


GENERATE_REFERENCES = ("DynamicCache",)
GENERATE_BASELINES = tuple(transformers_caches.NAMES)
"""What recipes are compared with, by the names that `--baselines` takes."""


def generate_candidates(
    plain: LlamaForCausalLM,
    shape: ModelShape,
    recipes: Sequence[str],
    context: int,
    baselines: Sequence[str] = GENERATE_BASELINES,
    limit_s: float | None = None,
) -> list[Candidate]:
    """Return the candidates at one context, with filled caches.

    baselines: some of `GENERATE_BASELINES`. limit_s: see `transformers_caches.candidate`.
    """
    _, k, v = random_qkv(shape, context)
    ids = torch.ones(shape.batch, 1, dtype=torch.long)
    weights = sum(p.nbytes for p in plain.parameters()) - plain.get_input_embeddings().weight.nbytes

    def step(
        name: str, model: Any, cache: Any, kv_bytes: Callable[[], int], read: Callable[[], int]
    ) -> Candidate:
        return Candidate(
            name,
            lambda: model(input_ids=ids, past_key_values=cache, use_cache=True).logits,
            kv_bytes=kv_bytes,
            read_bytes=lambda: weights + read(),
        )

    def baseline(name: str, cache: Any) -> Candidate:
        nbytes = partial(transformers_caches.nbytes, cache)
        return step(name, plain, cache, nbytes, nbytes)

    candidates = [
        transformers_caches.candidate(name, plain.config, k, v, partial(baseline, name), limit_s)
        for short, name in transformers_caches.NAMES.items()
        if short in baselines
    ]
    shared = {id(p): p for p in plain.parameters()}
    routed = copy.deepcopy(plain, shared)  # the same weights, with kvloom's attention

    def recipe(name: str) -> list[Candidate]:
        with torch.no_grad():  # in inference mode, the model's steps could not write to it
            cache = filled_cache(routed, resolve(name), shape, context)
        layers = [layer.cache for layer in cache.full_layers]
        return [
            step(
                name, routed, cache, lambda: cache.nbytes, lambda: sum(map(read_nbytes, layers))
            )
        ]  # fmt: skip

    for name in recipes:
        candidates += built(name, partial(recipe, name))
    return candidates
