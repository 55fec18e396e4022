"""One call of a model on a cache, and the clock around it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..hf.cache import Cache
from ..kernels.dispatch import compile_seconds

Progress = Callable[[str, int], None]
"""Called with what is being done, and with the units of work finished since the last call."""


def step(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """Feed ids [B, T] to the model on top of the cache; return the last logits [B, V]."""
    only_last = _only_last(type(model).forward)
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, **only_last)
    return out.logits[:, -1]


def now(device: torch.device) -> float:
    """Return the time in seconds once everything asked of the device is done.

    This clock stands still while kernels are compiled.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - compile_seconds()


@lru_cache
def _only_last(forward: Callable[..., Any]) -> dict[str, int]:
    """The argument for the last logits alone: a prompt's may take more memory than its cache."""
    known = "logits_to_keep" in inspect.signature(forward).parameters
    return {"logits_to_keep": 1} if known else {}
