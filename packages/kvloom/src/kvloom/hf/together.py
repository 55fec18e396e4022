"""One step of several caches in one forward pass: their rows are one batch.

The weights of a model are then read once for all of them, which is most of the time of a decode
step on a small batch. Each cache attends with its own rows. The results are those of separate steps
but for rounding: matrix products of another batch size may round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from operator import itemgetter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.step import StepInputs
from ..errors import CacheMisuse
from . import compat
from .cache import Cache
from .routed import RoutedCache, RoutedLayer, lasting


def can_step_together(model: PreTrainedModel, caches: Sequence[Cache]) -> bool:
    """Return whether `Together` supports these caches.

    It does not support layers that kvloom does not compress, position embeddings that are learned,
    models whose attention modules are adapted, and caches that have seen different numbers of
    tokens.
    """
    first = caches[0]
    return (
        not compat.adapted(compat.unwrap(model))
        and not any(cache.learned_positions for cache in caches)
        and all(isinstance(layer, RoutedLayer) for layer in first.layers)
        and len({cache.get_seq_length() for cache in caches}) == 1
    )


class Together(RoutedCache):
    """Several caches of one model as one cache, for one step.

    caches: with the rows of the batch in this order. Raises `CacheMisuse` for caches that cannot
    step together. A failure in the step leaves all of them as they were.
    """

    def __init__(self, model: PreTrainedModel, caches: Sequence[Cache]) -> None:
        if not can_step_together(model, caches):
            raise CacheMisuse("these caches cannot step together; step each of them alone")
        ends = [0, *accumulate(_rows(cache) for cache in caches)]
        self.caches, self.slices = caches, [slice(*pair) for pair in pairwise(ends)]
        layers = [
            _TogetherLayer([cache.layers[i] for cache in caches], self.slices)
            for i in range(len(caches[0].layers))
        ]
        super().__init__(layers, caches[0].fingerprint)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step of every cache."""
        with self.guard.step(), ExitStack() as steps:
            for cache in self.caches:
                steps.enter_context(cache.step())
            yield
            if unreached := self._unreached():
                raise unreached

    def check_batch(self, rows: int) -> None:
        """Raise `CacheMisuse` for another batch size than that of all caches."""
        if rows != self.slices[-1].stop:
            raise CacheMisuse(
                f"the caches hold {self.slices[-1].stop} rows together and were given {rows}; "
                "give one row for each"
            )


class _TogetherLayer(RoutedLayer):
    """The same layer of several caches; each attends with its own rows."""

    def __init__(self, layers: Sequence[RoutedLayer], slices: Sequence[slice]) -> None:
        super().__init__(layers[0].cache)
        self.members, self.slices = [layer.cache for layer in layers], slices

    def attend(self, given: StepInputs) -> Tensor:
        """Attend in each cache with its rows of the batch."""
        self.awaits_attention = False
        if given.queries.visible is not None:
            raise CacheMisuse(
                f"{self.cache.name}: rows with padding cannot step together; step each cache alone"
            )
        parts = [
            lasting(cache.run)(given.map(itemgetter(at)))
            for cache, at in zip(self.members, self.slices, strict=True)
        ]
        return torch.cat(parts)


def _rows(cache: Cache) -> int:
    like = cache.routed[0].cache.state.like
    if like is None:
        raise CacheMisuse("a cache is empty; give caches that have read a prompt")
    return like.shape[0]
