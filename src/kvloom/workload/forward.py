"""One forward pass of a model on a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

Progress = Callable[[str, int], None]
"""Called with the current work, and the units of work finished since the last call."""


def forward(model: PreTrainedModel, ids: Tensor, cache: Any, every: bool = False) -> Tensor:
    """Append ids [B, T] to a kvloom cache; return the logits of the last position, [B, V].

    every: return the logits of all T positions, [B, T, V].
    """
    last_only = {} if every else _last_logits_option(type(model).forward)
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, **last_only)
    return out.logits if every else out.logits[:, -1]


@lru_cache
def _last_logits_option(forward: Callable[..., Any]) -> dict[str, int]:
    """Return the keyword argument that computes the last logits only, where the model has it.

    The logits of a whole prompt may take more memory than its cache.
    """
    supported = "logits_to_keep" in inspect.signature(forward).parameters
    return {"logits_to_keep": 1} if supported else {}
