"""GPT-NeoX Japanese: rotary positions on the first channels; the last layer adds a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import (
    GPTNeoXJapaneseAttention,
    apply_rotary_pos_emb,
)

from .. import adapters
from ..routed_layer import RoutedLayer


def attend(
    module: GPTNeoXJapaneseAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """`GPTNeoXJapaneseAttention.forward` with a kvloom layer."""
    heads = (module.num_attention_heads, 3 * module.head_size)
    qkv = module.query_key_value(hidden_states).unflatten(-1, heads).transpose(1, 2)
    q, k, v = qkv.chunk(3, dim=-1)
    d = module.rotary_ndims
    rotated = apply_rotary_pos_emb(q[..., :d], k[..., :d], *position_embeddings)
    q, k = (torch.cat([a, x[..., d:]], dim=-1) for a, x in zip(rotated, (q, k), strict=True))
    out = adapters.attend(layer, q, k, v, attention_mask, module.head_size**-0.5)
    return module.dense(out), None, module.dense_bias
