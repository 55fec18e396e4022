"""The store alone: a prompt's keys and values into their formats, and its attention beside.

GB/s are of what goes in. A prompt's prefill is at least its attention, which is timed here; the
linear layers come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..store import KVSide
from . import caches
from .clock import Side, problem
from .prefill import attention, prompt
from .shape import Shape

AGAINST = ("the prompt's attention",)


def sides(shape: Shape, recipes: Sequence[str], context: int) -> list[Side]:
    """All sides at one prompt length."""
    q, k, v = prompt(shape, context)
    found, nbytes = [attention(AGAINST[0], q, k, v)], k.nbytes + v.nbytes
    for name in recipes:
        recipe = resolve(name)
        try:
            lanes = _Lanes(recipe, shape)
        except Exception as error:
            found.append(Side(name, problem=problem(error)))
            continue
        if recipe.store.exact:
            found.append(Side(name, problem="it packs nothing"))
            continue
        found.append(
            Side(name, partial(lanes.take, k, v), lanes.make, lanes.nbytes, lambda: nbytes)
        )
    return found


class _Lanes:
    """The store's two streams, empty before every call."""

    def __init__(self, recipe: Recipe, shape: Shape) -> None:
        self.recipe, self.shape = recipe, shape
        self.make()

    def make(self) -> None:
        metadata = caches.layers(self.recipe, self.shape)[0].metadata
        store, recents = self.recipe.store, self.recipe.protect.recents
        self.keys = KVSide(store.keys, recents[0], metadata.keys, metadata.rope)
        self.values = KVSide(store.values, recents[1], metadata.values)

    def take(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys.extend(k, 0, None, lambda lo, hi: torch.arange(lo, hi).view(1, 1, -1))
        self.values.extend(v, 0)

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
