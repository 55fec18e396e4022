"""A model run on a text, every layer seen as it attends; nothing is kept.

Decides how queries, keys and values are got at; what is made of them is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.checks import check_range, check_shapes
from ..cache.layer import LayerCache
from ..cache.part import Part, attend_parts
from ..hf.cache import Cache
from ..hf.routed import RoutedLayer
from ..positions.alibi import Alibi
from ..recipe.spec import Recipe


class Seen(NamedTuple):
    """What one layer attends with: q [B, Hq, T, D], k and v [B, Hk, T, D]; keys after RoPE.

    bias: fp32 [B, Hq, T], added to the logits (ALiBi).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None
    bias: Tensor | None = None


See = Callable[[int, Seen], None]
"""Called with the number of a layer, in the model, and what it attends with."""


class Recorder(LayerCache):
    """A layer that attends exactly within one prompt, shows it, and holds nothing."""

    def __init__(self, number: int, see: See) -> None:
        super().__init__(Recipe(), f"layer {number}")
        self.number, self.show = number, see

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        valid: Tensor | None = None,
        softcap: float | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """Attend causally; padding is not expected."""
        check_shapes(self.name, None, k, v)
        check_range(self.name, self.max_abs, k, v)
        t = k.shape[2]
        bias = None
        if alibi is not None:
            bias = alibi.bias(torch.arange(t, device=k.device).view(1, 1, -1))
        self.show(self.number, Seen(q, k, v, scale, softcap, bias))
        return attend_parts(q, [Part(k, v, None, causal=t, bias=bias)], scale, softcap)


def read(model: PreTrainedModel, ids: Tensor, see: See) -> None:
    """Run the model on contexts ids [B, T]."""
    cache = Cache(model, Recipe())
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, RoutedLayer):
            layer.cache = Recorder(number, see)
    with torch.inference_mode():
        model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)


def layers(model: PreTrainedModel) -> list[int]:
    """The numbers of the layers that kvloom would hold."""
    found = enumerate(Cache(model, Recipe()).layers)
    return [number for number, layer in found if isinstance(layer, RoutedLayer)]
