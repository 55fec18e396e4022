"""One forward pass of a model on a cache."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from kvloom.hf import compat
from kvloom.hf.routed import RoutedCache


def forward(model: PreTrainedModel, ids: Tensor, cache: RoutedCache, every: bool = False) -> Tensor:
    """Append ids [B, T] to a kvloom cache; return the logits of the last position, [B, V].

    every: return the logits of all T positions, [B, T, V].
    """
    last_only = {} if every else compat.last_logits_option(type(model).forward)
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, **last_only)
    return out.logits if every else out.logits[:, -1]
