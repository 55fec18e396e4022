"""The bytes of a layer with each choice, after a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvloom.recipe import Geometry

from .candidates import JOINT, Choice, RecipeShape, uniform

UNIFORM = Choice("rotated-4", "turbo-4", next(iter(JOINT)))
"""What all layers have where they are the same, as in `small`; its share fills the bytes."""
FINENESS = 10_000  # a share is a whole number of these parts of the prompt


class LayerSizes(NamedTuple):
    """What bytes depend on besides a layer's choice: the model, a prompt's tokens, the shape."""

    geometry: Geometry
    context: int
    shape: RecipeShape

    def of(self, choices: Sequence[Choice], share: float | None = None) -> np.ndarray:
        """Return the bytes of one layer with each choice, int64 [choices].

        share: what the layer keeps; None: what the choice says.
        """
        one = replace(self.geometry, layers=1, layer_numbers=None)
        found = [uniform(x, self.shape, share).nbytes(self.context, one) for x in choices]
        return np.array(found, np.int64)

    def uniform(self, shares: Sequence[float]) -> int:
        """Return the bytes of all layers with `UNIFORM`; shares: what each layer keeps."""
        return sum(int(self.of([UNIFORM], share)[0]) for share in shares)

    def filling(self, nbytes: int) -> float:
        """Return the largest share with which uniform layers fit into `nbytes`; 0 if none does."""
        low, high = 0, FINENESS
        while low < high:
            middle = (low + high + 1) // 2
            size = self.uniform([middle / FINENESS]) * self.geometry.layers
            low, high = (middle, high) if size <= nbytes else (low, middle - 1)
        return low / FINENESS
