"""A step of empty layers with random tokens, which compiles the kernels that such a step needs.

`kernels.companion` runs `main` in a process of its own.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ..kernels import companion, dispatch, ops
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import LayerFacts
from .inspection import fill
from .layer import LayerCache

_TOKENS = 2048  # a recipe that recalls reads fewer
_QUERIES = 64  # at the end of the prompt, for scores


class Rehearsal(NamedTuple):
    """One layer, and the shape of its attention; `place` among `layers`, as for `LayerCache`."""

    recipe: Recipe
    place: int
    layers: int
    rope: Rope | None
    facts: LayerFacts
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


@torch.inference_mode()
def rehearse(layers: Iterable[Rehearsal], prompt: bool = False) -> None:
    """Run a step in each layer. prompt: by kernels in its prompt too, else by the reference."""
    for spec in layers:
        layer = LayerCache(
            spec.recipe, place=spec.place, count=spec.layers, rope=spec.rope, facts=spec.facts
        )
        scale, d = spec.head_dim**-0.5, spec.head_dim
        q, k, v = (
            torch.randn(1, heads, tokens, width, dtype=torch.float32).to(spec.dtype)
            for heads, tokens, width in (
                (spec.q_heads, _QUERIES, d),
                (spec.kv_heads, _TOKENS, d),
                (spec.kv_heads, _TOKENS, spec.facts.value_dim or d),
            )
        )
        with nullcontext() if prompt else dispatch.use("ref"):
            fill(layer, q, k, v)
            ops.attend_prompt.choose(q, k, v, scale)  # loads its kernel
        layer.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], scale=scale)
        layer.forget_undo()


def main() -> None:
    """Rehearse steps of the layers whose pickle stdin has, then what follows their prompts."""
    companion.begin_rehearsing()
    torch.set_num_threads(1)
    layers = pickle.load(sys.stdin.buffer)
    rehearse(layers)
    rehearse(layers, prompt=True)
