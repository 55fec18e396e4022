"""One forward pass with a cache, for its logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from . import compat


def read_tokens(
    model: PreTrainedModel, ids: Tensor, cache: Any, all_logits: bool = False
) -> Tensor:
    """Append tokens to a kvloom cache by one forward pass, and return logits.

    Args:
        model: The model of the cache.
        ids: int64 [B, T].
        cache: A `Cache`, or `BatchedCaches`.
        all_logits: Whether to return the logits of all T positions.

    Returns:
        The logits of the last position [B, V], or of all positions [B, T, V].
    """
    if not all_logits:
        return last_logits(model, cache, input_ids=ids)
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits


def last_logits(model: PreTrainedModel, cache: Any, **inputs: Any) -> Tensor:
    """Run one forward pass with a cache, and return the logits of the last position [B, V].

    The logits of a whole prompt may take more memory than its cache, so the model computes the last
    ones alone where it can.
    """
    last_only = {"logits_to_keep": 1} if compat.takes(model, "logits_to_keep") else {}
    out = model(past_key_values=cache, use_cache=True, **inputs, **last_only)
    logits: Tensor = out.logits[:, -1]
    return logits
