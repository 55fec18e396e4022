"""A model adapter: a model of your own, whose attention has the code of CodeGen."""

import torch
from transformers.models.codegen.modeling_codegen import CodeGenAttention, apply_rotary_pos_emb

import kvloom
from kvloom.hf import adapters


@kvloom.register_adapter("my-model", CodeGenAttention)
def attend(module, layer, hidden_states, *, attention_mask, position_ids, **_):
    """Compute `CodeGenAttention.forward` with a kvloom layer: [B, T, hidden size], no weights."""
    shards = module.qkv_proj(hidden_states).unflatten(-1, (4, 3, -1))
    heads = (module.num_attention_heads, module.head_dim)
    q, v, k = (x.flatten(-2).unflatten(-1, heads) for x in shards.unbind(-2))  # [B, T, H, D]
    sin, cos = module.embed_positions[position_ids].to(k.dtype).chunk(2, dim=-1)
    d = module.rotary_dim or module.head_dim
    q, k = (
        torch.cat([apply_rotary_pos_emb(x[..., :d], sin, cos), x[..., d:]], dim=-1) for x in (q, k)
    )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = adapters.attend(layer, q, k, v, attention_mask, module.head_dim**-0.5)
    return module.resid_dropout(module.out_proj(out)), None
