"""Whole decode steps of a Llama with random weights, on caches filled to a depth.

A step reads the weights once, and what its cache reads; GB/s count both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..hf.cache import Cache
from ..recipe.resolve import resolve
from ..report.errors import logged_line
from ..workload import filled_caches
from ..workload.shapes import ModelShape
from . import transformers_caches
from .timing import Candidate

BASELINES = ("DynamicCache",)
_EXTRA_POSITIONS = 4096  # after the longest context, for the decode steps


def random_model(shape: ModelShape, longest: int) -> LlamaForCausalLM:
    """Return a model with random weights, for contexts of up to `longest` tokens."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=longest + _EXTRA_POSITIONS,
        attn_implementation="sdpa",
        dtype=shape.dtype,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def candidates(
    plain: LlamaForCausalLM, shape: ModelShape, recipes: Sequence[str], context: int
) -> list[Candidate]:
    """Return all candidates at one context, with filled caches."""
    _, k, v = filled_caches.random_qkv(shape, context)
    ids = torch.ones(shape.batch, 1, dtype=torch.long)
    weights = sum(p.nbytes for p in plain.parameters()) - plain.get_input_embeddings().weight.nbytes
    found = []
    for name in transformers_caches.INSTALL:
        try:
            cache = transformers_caches.filled(name, plain.config, k, v)
        except (ImportError, ValueError) as error:
            found.append(Candidate(name, problem=transformers_caches.missing(name, error)))
            continue
        nbytes = partial(transformers_caches.nbytes, cache)
        found.append(_candidate(name, plain, ids, cache, weights, nbytes, nbytes))
    shared = {id(p): p for p in plain.parameters()}
    routed = copy.deepcopy(plain, shared)  # the same weights, with kvloom's attention
    for name in recipes:
        try:
            with torch.no_grad():  # in inference mode, the model's steps could not write to it
                ours = filled_caches.filled_cache(routed, resolve(name), shape, context)
        except Exception as error:
            found.append(Candidate(name, problem=logged_line(error, "a candidate")))
            continue
        found.append(_candidate(name, routed, ids, ours, weights, *_byte_counts(ours)))
    return found


def _byte_counts(cache: Cache) -> tuple[Callable[[], int], Callable[[], int]]:
    """Return functions for the bytes in a cache, and the bytes that its last step read."""
    layers = [routed.cache for routed in cache.routed]
    return (
        lambda: cache.nbytes,
        lambda: sum(filled_caches.read_nbytes(layer) for layer in layers),
    )


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
