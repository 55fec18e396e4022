"""Whole decode steps of a Llama with random weights, on caches filled to a depth.

A step reads the weights once, and what its cache reads; GB/s count both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM

from kvloom.cache import read_nbytes
from kvloom.recipe import resolve

from ..workload import filled_caches
from ..workload.shapes import ModelShape
from . import transformers_caches
from .timing import Candidate, built

BASELINES = ("DynamicCache",)
PEERS = tuple(transformers_caches.NAMES)
"""What recipes are compared with, by the names that `--baselines` takes."""


def candidates(
    plain: LlamaForCausalLM,
    shape: ModelShape,
    recipes: Sequence[str],
    context: int,
    peers: Sequence[str] = PEERS,
    limit_s: float | None = None,
) -> list[Candidate]:
    """Return the candidates at one context, with filled caches.

    peers: some of `PEERS`. limit_s: see `transformers_caches.candidate`.
    """
    _, k, v = filled_caches.random_qkv(shape, context)
    ids = torch.ones(shape.batch, 1, dtype=torch.long)
    weights = sum(p.nbytes for p in plain.parameters()) - plain.get_input_embeddings().weight.nbytes

    def peer(name: str, cache: Any) -> Candidate:
        nbytes = partial(transformers_caches.nbytes, cache)
        return _candidate(name, plain, ids, cache, weights, nbytes, nbytes)

    caches = [name for short, name in transformers_caches.NAMES.items() if short in peers]
    measurable = [
        transformers_caches.candidate(name, plain.config, k, v, partial(peer, name), limit_s)
        for name in caches
    ]
    shared = {id(p): p for p in plain.parameters()}
    routed = copy.deepcopy(plain, shared)  # the same weights, with kvloom's attention

    def recipe(name: str) -> list[Candidate]:
        with torch.no_grad():  # in inference mode, the model's steps could not write to it
            cache = filled_caches.filled_cache(routed, resolve(name), shape, context)
        layers = [layer.cache for layer in cache.routed]
        return [
            _candidate(
                name, routed, ids, cache, weights, lambda: cache.nbytes,
                lambda: sum(map(read_nbytes, layers)),
            )
        ]  # fmt: skip

    for name in recipes:
        measurable += built(name, partial(recipe, name))
    return measurable


def _candidate(
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
