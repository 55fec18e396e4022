"""BLOOM: ALiBi over the tokens that are not padding."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import (
    BloomAttention,
    build_alibi_tensor,
    dropout_add,
)

from ...positions.alibi import Alibi, positions
from .. import adapters
from ..routed_layer import RoutedLayer


def alibi(config: BloomConfig) -> bool:
    """Return True: every BLOOM has ALiBi, and its config does not say so."""
    return True


def attend(
    module: BloomAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    residual: Tensor,
    *,
    attention_mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """`BloomAttention.forward` with a kvloom layer."""
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    tokens = layer.cache.seen + q.shape[2]
    position = positions(adapters.visible_mask(attention_mask), q.shape[0], tokens, q.device)
    bias = Alibi(_slopes(module.num_heads, q.device), position)
    out = adapters.attend(layer, q, k, v, attention_mask, module.inv_norm_factor, bias)
    out = dropout_add(module.dense(out), residual, module.hidden_dropout, module.training)
    return out, None


@lru_cache
def _slopes(heads: int, device: torch.device) -> Tensor:
    """The bias of token 1: fp32 [Hq]."""
    mask = torch.ones(1, 2, dtype=torch.long, device=device)
    return build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
