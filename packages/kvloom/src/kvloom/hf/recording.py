"""Layers that attend exactly within one prompt, show what they attend with, and store nothing.

Decides how queries, keys and values are obtained. The caller decides what to compute from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..cache.attention import attend_to
from ..cache.checks import check_range, check_shapes, without_padding
from ..cache.step import StepInputs
from ..kernels.attend.regions import Region
from .observe import alibi_bias
from .routed_cache import RoutedCache
from .routed_layer import RoutedLayer, on_one_device


class AttentionInputs(NamedTuple):
    """The inputs of one layer's attention: q [B, Hq, T, D], k and v [B, Hk, T, D].

    Keys are after RoPE. bias: fp32 [B, Hq, T], added to the logits (ALiBi); None without one.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None = None


Observer = Callable[[int, AttentionInputs], None]
"""Called with the index of a layer in the model, and the inputs of its attention."""


def attend_causally(step: StepInputs, index: Tensor | None = None) -> Tensor:
    """Attend the T queries of a step, the last of N tokens, causally to k, v [B, Hk, N, D].

    index: logical indices, int64 [1, Hk or 1, N]; None: 0 to N.
    """
    queries, k, v, *_ = step
    bias = alibi_bias(queries, k, index)
    region = Region.exact(k, v, visible=queries.visible, step_tokens=queries.tokens, bias=bias)
    out, *_ = attend_to(
        queries.q, [region], queries.scale, queries.softcap, sink_logits=queries.sink_logits
    )
    return out


class RecordingLayer(RoutedLayer):
    """A layer that attends exactly within one prompt, calls the observer, and stores nothing."""

    def __init__(self, routed: RoutedLayer, layer_index: int, observer: Observer) -> None:
        super().__init__(routed.cache, shared=routed.shared)
        self.layer_index, self.observer = layer_index, observer

    def attend(self, step: StepInputs) -> Tensor:
        """Attend causally; padding is hidden."""
        step = without_padding(on_one_device(step))
        if self.arrived():
            return attend_causally(step)
        queries, k, v, *_ = step
        check_shapes(self.cache.name, None, k, v, v.shape[3])
        check_range(self.cache.name, self.cache.recipe.store, self.cache.max_abs, k, v)
        bias = alibi_bias(queries, k)
        inputs = AttentionInputs(queries.q, k, v, queries.scale, queries.softcap, bias)
        self.observer(self.layer_index, inputs)
        return attend_causally(step)


def record_layers(cache: RoutedCache, recorded: RoutedCache, observer: Observer) -> None:
    """Let `cache` record the layers of full attention that `recorded` compresses.

    Both may be the same cache. Nothing is stored in either.
    """
    for layer_index, layer in recorded.by_index.items():
        if layer.window is None:
            cache.replace(layer_index, RecordingLayer(layer, layer_index, observer))
