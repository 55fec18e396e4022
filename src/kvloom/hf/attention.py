"""The attention and mask functions that transformers calls under the name "kvloom".

Decides what computes attention. Keys that carry a kvloom layer go to that layer. All others (no
cache, a stock cache, the sliding layers of a mixed model) go to transformers' own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ..cache.step import Queries, StepInputs
from ..errors import CacheMisuse
from ..kernels.attend import reference as ref
from .compat import padding_mask
from .routed import RoutedLayer

NAME = "kvloom"


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend query [B, Hq, T, D]; returns ([B, T, Hq, D] contiguous, None)."""
    layer = getattr(key, "_kvloom_layer", None)
    if layer is None:
        return _stock(
            module, query, key, value, attention_mask, dropout, scaling, softcap, **kwargs
        )
    check_mask(layer, attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    visible = None if attention_mask is None else attention_mask[:, None]
    out = layer.attend(StepInputs(Queries(query, scale, visible, softcap), key, value))
    return out.transpose(1, 2).contiguous(), None


def check_mask(layer: RoutedLayer, mask: Tensor | None) -> None:
    """Raise `CacheMisuse` for a mask other than a 2-D padding mask."""
    if mask is not None and mask.dim() != 2:
        raise CacheMisuse(
            f"{layer.cache.name}: kvloom takes a 2-D padding mask [batch, tokens], got a mask of "
            f"shape {tuple(mask.shape)}; give a 2-D mask"
        )


def _stock(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers would, where `mask` returned a 2-D mask."""
    t, n = query.shape[2], key.shape[2]
    if mask is not None and mask.dim() == 2:
        mask = padding_mask(mask, n)[:, None, None, :]
        if t > 1:
            mask = ref.visible_keys(t, n, mask, query.device)
    if softcap is None:
        if mask is None and t > 1 and n > t:  # transformers would align causality to the left
            mask = ref.visible_keys(t, n, None, query.device)[None, None]
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    state = _softcapped(query, key, value, scale, mask, softcap)
    return state.to(query.dtype).transpose(1, 2).contiguous(), None


def _softcapped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, softcap: float
) -> Tensor:
    """Attend with capped logits and an optional bool mask [B, 1, T, N], one row at a time."""
    if mask is None:
        return ref.attend(q, k, v, scale, causal=q.shape[2] > 1, softcap=softcap).out
    rows = [
        ref.attend(q[:, :, i : i + 1], k, v, scale, visible=mask[:, :, i], softcap=softcap).out
        for i in range(q.shape[2])
    ]
    return torch.cat(rows, dim=2)


def mask(
    *args: Any,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the 2-D padding mask (None if it is all ones); no 4-D mask is built.

    Sliding and chunked layers, and masks that are not plainly causal (image blocks, packed
    sequences), get the mask of transformers' sdpa.
    """
    if not allow_is_causal_skip or local_size is not None:
        return sdpa_mask(
            *args,
            kv_length=kv_length,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            local_size=local_size,
            **kwargs,
        )
    if attention_mask is None or attention_mask.all():
        return None
    return padding_mask(attention_mask, kv_length)


def register() -> None:
    """Register "kvloom" with transformers as an attention implementation."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
