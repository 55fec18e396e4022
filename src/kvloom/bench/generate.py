"""Whole decode steps of a Llama with random weights, on caches filled to a depth.

A step reads the weights once and what its cache reads; GB/s count both.
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
from . import caches
from .clock import Side, problem
from .shape import ModelShape

AGAINST = ("DynamicCache",)
_MORE = 4096  # positions behind the longest context


def model(shape: ModelShape, longest: int) -> LlamaForCausalLM:
    """The model, its weights drawn at random; takes `longest` tokens and some steps."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.q_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=longest + _MORE,
        attn_implementation="sdpa",
        dtype=shape.dtype,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(shape.dtype)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def sides(
    plain: LlamaForCausalLM, shape: ModelShape, recipes: Sequence[str], context: int
) -> list[Side]:
    """All sides at one context, their caches filled."""
    _, k, v = caches.random(shape, context)
    ids = torch.ones(shape.batch, 1, dtype=torch.long)
    weights = sum(p.nbytes for p in plain.parameters()) - plain.get_input_embeddings().weight.nbytes
    found = []
    for name in caches.STOCK:
        try:
            cache = caches.stock(name, plain.config, k, v)
        except (ImportError, ValueError) as error:
            found.append(Side(name, problem=caches.missing(name, error)))
            continue
        found.append(_side(name, plain, ids, cache, weights, partial(caches.nbytes, cache)))
    shared = {id(p): p for p in plain.parameters()}
    routed = copy.deepcopy(plain, shared)  # kvloom's attention is put into this one
    for name in recipes:
        try:
            with torch.no_grad():  # steps of a model write to these tensors in any mode
                ours = caches.ours(routed, resolve(name), shape, context)
        except Exception as error:
            found.append(Side(name, problem=problem(error)))
            continue
        found.append(_side(name, routed, ids, ours, weights, *_counts(ours)))
    return found


def _counts(cache: Cache) -> tuple[Callable[[], int], Callable[[], int]]:
    """What tells the bytes that a cache holds, and those that its last step read."""
    layers = [routed.cache for routed in cache.routed]
    return lambda: cache.nbytes, lambda: sum(caches.read_nbytes(layer) for layer in layers)


def _side(
    name: str,
    model: Any,
    ids: torch.Tensor,
    cache: Any,
    weights: int,
    held: Callable[[], int],
    read: Callable[[], int] | None = None,
) -> Side:
    return Side(
        name,
        lambda: model(input_ids=ids, past_key_values=cache, use_cache=True).logits,
        held=held,
        read=lambda: weights + (read or held)(),
    )
