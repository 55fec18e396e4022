"""Layers with two parts: what kvloom compresses, and states that transformers stores.

Decides which part of a layer a call goes to.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from . import stock
from .routed_layer import RoutedLayer


class HybridLayer(CacheLayerMixin, LinearAttentionCacheLayerMixin):
    """A compressed layer and the states that its model has beside attention, as one layer.

    `states` is the layer of transformers that would store both; its keys and values stay empty.
    The cache reorders, crops, resets and restores the two parts.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, compressed: RoutedLayer, states: LinearAttentionLayer) -> None:
        self.compressed, self.states = compressed, states

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the states: models read some."""
        if name == "states":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self.states, name)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can remove tokens from the states."""
        return stock.is_croppable(self.states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: each part does it."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the present keys and values."""
        return self.compressed.update(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the updated states of a convolution."""
        return self.states.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the updated recurrent states."""
        return self.states.update_recurrent_state(*args, **kwargs)

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return (tokens seen + query tokens, 0)."""
        return self.compressed.get_mask_sizes(query_length)

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens seen."""
        return self.compressed.get_seq_length()

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Record each step, so that `crop` can remove its tokens."""
        self.compressed.activate_past_recording()
        self.states.activate_past_recording()


def compressed_part(layer: Any) -> RoutedLayer | None:
    """Return what kvloom stores of a layer; None if transformers stores all of it."""
    part = layer.compressed if isinstance(layer, HybridLayer) else layer
    return part if isinstance(part, RoutedLayer) else None


def stock_part(layer: Any) -> Any:
    """Return what transformers stores of a layer; None if kvloom stores all of it."""
    if isinstance(layer, HybridLayer):
        return layer.states
    return None if isinstance(layer, RoutedLayer) else layer


def with_compressed(layer: Any, compressed: RoutedLayer) -> Any:
    """Return a compressed layer with the states of `layer`, if that has some."""
    states = stock_part(layer)
    return HybridLayer(compressed, states) if stock.has_states(states) else compressed
