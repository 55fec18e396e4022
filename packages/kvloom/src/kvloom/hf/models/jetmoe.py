"""JetMoe: experts for the queries; query heads i, i + Hk, ... attend to key/value head i."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.jetmoe.modeling_jetmoe import JetMoeAttention, apply_rotary_pos_emb

from .. import adapters
from ..routed_layer import RoutedLayer


def attend(
    module: JetMoeAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """`JetMoeAttention.forward` with a kvloom layer."""
    heads = (module.num_key_value_heads, module.head_dim)
    q, router_logits, experts = module.experts.map(hidden_states)  # [B, T, experts, Hk * D]
    q = q.unflatten(-1, heads).transpose(2, 3).flatten(2, 3)  # the heads of a key/value head
    k, v = (x.unflatten(-1, heads) for x in module.kv_proj(hidden_states).chunk(2, dim=-1))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    out = adapters.attend(layer, q, k, v, attention_mask, module.scaling)
    out = out.unflatten(-1, (heads[0], module.top_k, heads[1])).transpose(2, 3).flatten(3)
    return module.experts.reduce(out, experts), None, router_logits
