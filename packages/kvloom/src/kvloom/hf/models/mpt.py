"""MPT: ALiBi, counted in slots: padding takes up distance where it lies between tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import MptConfig
from transformers.models.mpt.modeling_mpt import MptAttention

from ...positions.alibi import Alibi, positions
from .. import adapters
from ..routed_layer import RoutedLayer


def alibi(config: MptConfig) -> bool:
    """Return True: every MPT has ALiBi, and its config does not say so."""
    return True


def attend(
    module: MptAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    position_bias: Tensor,
    attention_mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """`MptAttention.forward` with a kvloom layer; position_bias [Hq, 1, max_seq_len] ends in 0."""
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = (module.n_heads, module.head_dim)
    q, k, v = (x.unflatten(-1, heads).transpose(1, 2) for x in qkv.chunk(3, dim=2))
    slopes = -position_bias[:, 0, -2].float()
    tokens = layer.cache.seen + q.shape[2]
    bias = Alibi(slopes, positions(None, q.shape[0], tokens, q.device))
    out = adapters.attend(layer, q, k, v, attention_mask, module.softmax_scale, bias)
    return module.out_proj(out), None
