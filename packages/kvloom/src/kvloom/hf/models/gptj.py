"""GPT-J, CodeGen: rotary positions on the first `rotary_dim` channels, in neighbouring pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CodeGenConfig, GPTJConfig
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

from ...positions.rope import Rope
from .. import adapters
from ..routed_layer import RoutedLayer


def rope(config: GPTJConfig | CodeGenConfig) -> Rope:
    """Return how the model rotates keys: by a table of its own, not by a module."""
    dims = config.rotary_dim or config.n_embd // config.n_head
    return Rope(10000.0 ** -(torch.arange(0, dims, 2).float() / dims), interleaved=True)


def attend(
    module: Any,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    position_ids: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """`forward` of an attention module with a kvloom layer."""
    heads = (module.num_attention_heads, module.head_dim)
    q, k, v = (x.unflatten(-1, heads) for x in _projected(module, hidden_states))  # [B, T, H, D]
    table = module.embed_positions.to(position_ids.device)
    sin, cos = table[position_ids].to(k.dtype).chunk(2, dim=-1)
    d = module.rotary_dim or module.head_dim
    q, k = (
        torch.cat([apply_rotary_pos_emb(x[..., :d], sin, cos), x[..., d:]], dim=-1) for x in (q, k)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = adapters.attend(layer, q, k, v, attention_mask, 1 / module.scale_attn)
    return module.resid_dropout(module.out_proj(out)), None


def _projected(module: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values [B, T, H * D]."""
    if not hasattr(module, "qkv_proj"):
        projections = module.q_proj, module.k_proj, module.v_proj
        return tuple(project(hidden_states) for project in projections)
    shards = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))  # CodeGen: of 4 TPU cores
    q, v, k = (x.flatten(-2) for x in shards.unbind(-2))
    return q, k, v
