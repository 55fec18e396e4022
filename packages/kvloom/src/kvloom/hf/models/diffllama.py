"""DiffLlama: differential attention (arXiv:2410.05258), whose heads come in pairs.

Key/value heads i and i + Hk / 2 are a pair: either key attends to both values. kvloom stores a pair
as one head of 2D channels. A query has zeros in the channels of the other key, so that its logits
are exact, and reads both values at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, PreTrainedModel
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...positions.rope import Rope
from .. import adapters, rotary
from ..routed_layer import RoutedLayer


def problem(model: PreTrainedModel) -> str | None:
    """Return why kvloom cannot route a model: transformers 5.10 allows heads without a pair."""
    odd = model.config.num_key_value_heads % 2
    return "its key/value heads are odd in number, and so no pairs" if odd else None


def heads(config: DiffLlamaConfig) -> tuple[int, int]:
    """Return the query heads, and the pairs of key/value heads."""
    return config.num_attention_heads, config.num_key_value_heads // 2


def head_dim(config: DiffLlamaConfig) -> int:
    """Return the channels of a pair."""
    single = getattr(config, "head_dim", None)
    return 2 * (single or config.hidden_size // config.num_attention_heads)


def rope(config: DiffLlamaConfig) -> Rope:
    """Return how a pair's keys rotate: both alike."""
    return Rope(rotary.constant_inv_freq(DiffLlamaRotaryEmbedding(config)).repeat(2))


def attend(
    module: DiffLlamaAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,
) -> tuple[Tensor, None]:
    """`DiffLlamaAttention.forward` with a kvloom layer."""
    d = module.head_dim
    q, k, v = adapters.projected(hidden_states, d, module.q_proj, module.k_proj, module.v_proj)
    q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
    q, k, v = (x.unflatten(1, (2, -1)) for x in (q, k, v))  # the two of a pair first
    zeros = torch.zeros_like(q[:, 0])
    q = torch.stack([_pair(q[:, 0], zeros), _pair(zeros, q[:, 1])], dim=1)
    # the query heads of a pair side by side: [B, pairs * 2 * G, T, 2D]
    q = q.unflatten(2, (k.shape[2], -1)).transpose(1, 2).flatten(1, 3)
    k, v = _pair(*k.unbind(1)), torch.cat(v.unbind(1), dim=-1)
    scale = getattr(module, "scaling", d**-0.5)  # transformers 5.10 has no such attribute
    out = adapters.attend(layer, q, k, v, attention_mask, scale)
    out = out.unflatten(-1, (k.shape[1], 2, -1, 2 * d))  # [B, T, pairs, 2, G, 2D]
    positive, negative = (x.flatten(2, 3) for x in out.unbind(3))
    out = module.groupnorm(positive - _weight(module, out.dtype) * negative)
    return module.o_proj(((1 - module.lambda_init) * out).flatten(2)), None


def _pair(a: Tensor, b: Tensor) -> Tensor:
    """Return [B, H, T, 2D] of two heads [B, H, T, D], rotated channels in pairs (i, i + D)."""
    (a1, a2), (b1, b2) = a.chunk(2, dim=-1), b.chunk(2, dim=-1)
    return torch.cat([a1, b1, a2, b2], dim=-1)


def _weight(module: DiffLlamaAttention, dtype: torch.dtype) -> Tensor:
    """Return the weight of the attention that is subtracted."""
    first, second = (
        torch.exp(torch.sum(a * b, dtype=torch.float32)).to(dtype)
        for a, b in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    return first - second + module.lambda_init
