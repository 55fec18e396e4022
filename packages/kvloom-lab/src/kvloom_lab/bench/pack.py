"""Quantization alone: pack a prompt's keys and values, compared with the prompt's attention.

GB/s are of the exact keys and values. A prefill takes at least the time of the prompt's attention,
which is timed here; the linear layers come in addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvloom.recipe.resolve import resolve
from kvloom.recipe.spec import Recipe
from kvloom.store import KVSide

from ..workload import filled_caches
from ..workload.shapes import LayerShape
from .prefill import random_prompt, sdpa
from .timing import Candidate, built

BASELINES = ("the prompt's attention",)


def candidates(shape: LayerShape, recipes: Sequence[str], context: int) -> list[Candidate]:
    """Return all candidates at one prompt length."""
    q, k, v = random_prompt(shape, context)
    found = [sdpa(BASELINES[0], q, k, v)]
    for name in recipes:
        found += built(name, partial(_recipe, name, shape, k, v))
    return found


def _recipe(name: str, shape: LayerShape, k: Tensor, v: Tensor) -> list[Candidate]:
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
        metadata = filled_caches.empty_layers(self.recipe, self.shape)[0].state.metadata
        store, recents = self.recipe.store, self.recipe.protect.recents
        self.keys = KVSide(store.keys, recents[0], metadata.keys, metadata.rope)
        self.values = KVSide(store.values, recents[1], metadata.values)

    def pack(self, k: Tensor, v: Tensor) -> None:
        self.keys.extend(k, 0, None, lambda lo, hi: torch.arange(lo, hi).view(1, 1, -1))
        self.values.extend(v, 0)

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
