"""Falcon: rotary positions or ALiBi; many, few or one key/value head.

ALiBi as the model computes it under "sdpa", its default: slope times position rounded to bfloat16,
divided by sqrt(D). ("eager" adds the bias a second time.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import FalconConfig
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    apply_rotary_pos_emb,
    build_alibi_tensor,
)

from ...positions.alibi import Alibi, positions
from .. import adapters
from ..routed_layer import RoutedLayer


def heads(config: FalconConfig) -> tuple[int, int]:
    """Return the query heads and the key/value heads, which the config says by two flags."""
    single = config.multi_query and not config.new_decoder_architecture
    return config.num_attention_heads, 1 if single else config.num_kv_heads


@dataclass(frozen=True)
class _Rounded(Alibi):
    """Slopes and biases in bfloat16, so that the steps between far tokens are uneven."""

    scale: float = 1.0

    def times(self, slopes: Tensor, position: Tensor, newest: Tensor) -> Tensor:
        slopes = slopes.bfloat16()
        return ((slopes * position).float() - (slopes * newest).float()) * self.scale


def attend(
    module: FalconAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    alibi: Tensor | None,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """`FalconAttention.forward` with a kvloom layer."""
    qkv = module._split_heads(module.query_key_value(hidden_states))
    q, k, v = (x.transpose(1, 2) for x in qkv)
    if module.new_decoder_architecture:  # keys and values come repeated for every query head
        r = module.num_heads // module.num_kv_heads
        k, v = k[:, ::r], v[:, ::r]
    scale = module.inv_norm_factor
    if alibi is None:
        bias = None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    else:
        tokens = layer.cache.seen + q.shape[2]
        position = positions(adapters.visible_mask(attention_mask), q.shape[0], tokens, q.device)
        bias = _Rounded(_slopes(module.num_heads, q.device), position, scale=scale)
    out = adapters.attend(layer, q, k, v, attention_mask, scale, bias)
    return module.dense(out), None


@lru_cache
def _slopes(heads: int, device: torch.device) -> Tensor:
    """The bias of token 1, before it is divided: fp32 [Hq]."""
    mask = torch.ones(1, 2, dtype=torch.long, device=device)
    return build_alibi_tensor(mask, heads, torch.float32)[:, 0, 1]
