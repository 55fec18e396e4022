"""Look on while a cache attends: every layer's queries, beside the exact keys of all tokens.

Decides nothing and changes no answer. The exact keys are held outside the cache, so that what a
step would have seen with nothing dropped or packed can be told; they do not count in its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.layer import LayerCache
from ..errors import UnsupportedModel
from ..positions.alibi import Alibi
from ..store.buffer import Buffer
from .cache import Cache, RoutedLayer


class Look(NamedTuple):
    """One layer's step: q [B, Hq, T, D] over the keys [B, Hk, N, D] of all tokens so far.

    Both as the model gives them, at their own positions also where the recipe renumbers. place:
    number of the layer among those that the cache holds. cache: as the step finds it. bias: ALiBi's
    of all tokens, fp32 [B, Hq, N], where the model has it.
    """

    place: int
    cache: LayerCache
    q: Tensor
    keys: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None


class WatchedLayer(RoutedLayer):
    """A `RoutedLayer` that shows every step to `saw` before it attends."""

    def __init__(self, routed: RoutedLayer, place: int, saw: Callable[[Look], None]) -> None:
        super().__init__(routed.cache)
        self.place, self.saw = place, saw
        self.exact = Buffer()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        mask: Tensor | None,
        softcap: float | None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend as `RoutedLayer` does."""
        self.exact.append(k.detach())
        keys = self.exact.view()
        every = torch.arange(keys.shape[2], device=keys.device).view(1, 1, -1)
        bias = None if alibi is None else alibi.bias(every)
        self.saw(Look(self.place, self.cache, q, keys, scale, softcap, bias))
        return super().attend(q, k, v, scale, mask, softcap, alibi)

    def roll_back(self) -> None:
        """Undo the last step, as `RoutedLayer` does."""
        super().roll_back()
        if len(self.exact) > self.cache.seen:
            self.exact.drop_back(len(self.exact) - self.cache.seen)


def watch(cache: Cache, saw: Callable[[Look], None]) -> None:
    """Show every step of a fresh cache to `saw`, layer by layer; its layers can tell `logical`.

    Raises `UnsupportedModel` where the cache holds no layer of the model.
    """
    if not cache.routed:
        raise UnsupportedModel(
            "kvloom holds no layer of this model, as sliding windows bound all of them already; "
            "there is nothing to look at, so give another model"
        )
    for place, routed in enumerate(cache.routed):
        routed.cache.trace = True
        cache.layers[cache.layers.index(routed)] = WatchedLayer(routed, place, saw)
