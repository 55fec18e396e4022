"""Observe a cache while it attends: every layer's queries, beside the exact keys of all tokens.

Decides nothing and changes no result. The exact keys are stored outside the cache and do not count
in its bytes: they show what a step would have attended to with nothing dropped or packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.latents import query_keys
from ..cache.layer import LayerCache
from ..cache.step import Queries, StepInputs
from ..errors import UnsupportedModel
from ..kernels import ops
from ..store.buffer import Buffer
from .routed_cache import RoutedCache
from .routed_layer import RoutedLayer


class ObservedStep(NamedTuple):
    """One layer's step: q [B, Hq, T, D] over the keys [B, Hk, N, D] of all tokens so far.

    Both are as the model gives them, at their own positions also where the recipe renumbers.

    Attributes:
        layer: The index of the layer among those of the cache.
        cache: The layer, before the step.
        q: The queries.
        keys: The keys.
        scale: The factor of q @ k in the logits.
        softcap: The soft cap of the logits; None: they have none.
        bias: The bias that ALiBi adds for all tokens, fp32 [B, Hq, N], where the model has it.
        later_seen: See `Queries`.
        sink_logits: Of attention sinks that the model has learned, fp32 [Hq], where it has them.
    """

    layer: int
    cache: LayerCache
    q: Tensor
    keys: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None
    later_seen: Tensor | None = None
    sink_logits: Tensor | None = None

    def mass(self) -> Tensor:
        """Return the attention of the step's queries to each token, summed, fp32 [B, Hq, N]."""
        q, keys, bias = self.q, self.keys, self.bias
        if self.sink_logits is not None:  # a token before all others, whose key is zero
            b, hk, n, d = keys.shape
            keys = torch.cat([keys.new_zeros(b, hk, 1, d), keys], dim=2)
            bias = q.new_zeros(b, q.shape[1], n, dtype=torch.float32) if bias is None else bias
            bias = torch.cat([self.sink_logits[None, :, None].expand(b, -1, -1), bias], dim=2)
        mass = ops.column_mass(
            q, keys, self.scale, softcap=self.softcap, bias=bias, later_seen=self.later_seen
        )
        return mass[..., -self.keys.shape[2] :]


class ObservedLayer(RoutedLayer):
    """A `RoutedLayer` that shows every step to `on_step` before it attends."""

    reads_queries = True

    def __init__(
        self, routed: RoutedLayer, layer: int, on_step: Callable[[ObservedStep], None]
    ) -> None:
        super().__init__(routed.cache, shared=routed.shared)
        self.layer, self.on_step = layer, on_step
        self.exact = Buffer()

    def attend(self, step: StepInputs) -> Tensor:
        """Attend as `RoutedLayer` does.

        A repetition of the prompt is not a step, nor is the attention of a layer that shares keys.
        """
        if self.repeated is not None or not self.awaits_attention:
            return super().attend(step)
        self.exact.append(query_keys(step.queries.q, step.k, step.v).detach())
        keys = self.exact.view()
        queries = step.queries
        bias = alibi_bias(queries, keys)
        shown = queries.q, keys, queries.scale, queries.softcap, bias
        sinks = queries.sink_logits
        self.on_step(ObservedStep(self.layer, self.cache, *shown, queries.later_seen, sinks))
        return super().attend(step)

    def roll_back(self) -> None:
        """Undo the last step, as `RoutedLayer` does."""
        super().roll_back()
        self._remove_keys()

    def crop(self, tokens: int) -> None:
        """Remove tokens, as `RoutedLayer` does."""
        super().crop(tokens)
        self._remove_keys()

    def reset(self) -> None:
        """Remove all tokens."""
        super().reset()
        self.exact.clear()

    def map_rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply fn to every tensor, along the batch dimension."""
        super().map_rows(fn)
        self.exact.map(fn)

    def _remove_keys(self) -> None:
        """Remove the keys of tokens that are not stored any more."""
        if len(self.exact) > self.cache.seen:
            self.exact.drop_back(len(self.exact) - self.cache.seen)


def alibi_bias(queries: Queries, keys: Tensor, index: Tensor | None = None) -> Tensor | None:
    """Return ALiBi's bias of keys [B, Hk, N, D], fp32 [B, Hq, N]; None where the model has none.

    index: logical indices, int64 [B or 1, Hk or 1, N]; None: 0 to N.
    """
    if queries.alibi is None:
        return None
    if index is None:
        index = torch.arange(keys.shape[2], device=keys.device).view(1, 1, -1)
    return queries.alibi.bias(index)


def observe_steps(cache: RoutedCache, on_step: Callable[[ObservedStep], None]) -> None:
    """Call `on_step` at every step of an empty cache, layer by layer, and trace its layers.

    Raises `UnsupportedModel` if the cache compresses no layer of the model.
    """
    if not cache.full_layers:
        raise UnsupportedModel(
            "kvloom holds no layer of this model, as sliding windows bound all of them already; "
            "there is nothing to observe, so give another model"
        )
    full_layers = [(i, x) for i, x in cache.by_index.items() if x.window is None]
    for layer, (layer_index, routed) in enumerate(full_layers):
        routed.cache.observe()
        cache.replace(layer_index, ObservedLayer(routed, layer, on_step))
