"""Compute in float32: in bfloat16, rounding alone hides what one layer's format costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

_HALF = torch.float16, torch.bfloat16


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let a model have its weights in float32, beside its own ones, which it has again afterwards.

    Weights that are not in half precision, such as quantized ones, stay as they are.
    """
    tensors = [x for x in (*model.parameters(), *model.buffers()) if x.dtype in _HALF]
    own = [x.data for x in tensors]
    try:
        for one in tensors:
            one.data = one.data.float()
        yield
    finally:
        for one, data in zip(tensors, own, strict=True):
            one.data = data
