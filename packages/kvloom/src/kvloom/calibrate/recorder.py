"""Run a model on a text and pass every layer's attention inputs to a function; store nothing.

Decides how queries, keys and values are obtained. The caller decides what to compute from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.attention import attend_to
from ..cache.checks import check_range, check_shapes
from ..cache.layer import LayerCache
from ..cache.step import StepInputs
from ..hf.cache import Cache
from ..hf.routed import RoutedLayer
from ..kernels.attend.regions import Region
from ..recipe.spec import Recipe


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
"""Called with a layer's number in the model, and the inputs of its attention."""


class RecordingLayer(LayerCache):
    """A layer that attends exactly within one prompt, calls the observer, and stores nothing."""

    def __init__(self, number: int, observer: Observer) -> None:
        super().__init__(Recipe(), f"layer {number}")
        self.number, self.observer = number, observer

    def run(self, given: StepInputs) -> Tensor:
        """Attend causally. Prompts with padding are not supported."""
        queries, k, v = given
        q, scale, softcap, alibi = queries.q, queries.scale, queries.softcap, queries.alibi
        check_shapes(self.name, None, k, v)
        check_range(self.name, self.state.max_abs, k, v)
        t = k.shape[2]
        bias = None
        if alibi is not None:
            bias = alibi.bias(torch.arange(t, device=k.device).view(1, 1, -1))
        self.observer(self.number, AttentionInputs(q, k, v, scale, softcap, bias))
        out, _ = attend_to(q, [Region.exact(k, v, own=t, bias=bias)], scale, softcap)
        return out


def record(model: PreTrainedModel, ids: Tensor, observer: Observer) -> None:
    """Run the model on contexts ids [B, T] and call the observer once a layer."""
    cache = Cache(model, Recipe())
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, RoutedLayer):
            layer.cache = RecordingLayer(number, observer)
    with torch.inference_mode():
        model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)


def compressible_layers(model: PreTrainedModel) -> list[int]:
    """Return the numbers of the layers whose cache kvloom replaces."""
    found = enumerate(Cache(model, Recipe()).layers)
    return [number for number, layer in found if isinstance(layer, RoutedLayer)]
