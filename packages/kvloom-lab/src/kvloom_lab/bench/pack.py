"""Quantization alone: pack a prompt's keys and values, compared with the prompt's attention.

GB/s are of the exact keys and values. A prefill takes at least the time of the prompt's attention,
which is timed here; the linear layers come in addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from kvloom.recipe import Recipe, resolve
from kvloom.store import PromptPacker

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
        metadata = filled_caches.random_calibration(self.recipe, self.shape)
        self.packer = PromptPacker(self.recipe.store, self.recipe.protect.recents, metadata)

    def pack(self, k: Tensor, v: Tensor) -> None:
        self.packer.pack(k, v)

    def nbytes(self) -> int:
        return self.packer.nbytes
