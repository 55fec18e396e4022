"""BigBird, MegatronBERT, RemBERT, RoFormer: decoders with the attention of BERT.

RoFormer alone rotates its queries and keys, in neighbouring pairs of channels, and optionally its
values.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...errors import UnsupportedModel
from ...positions.rope import Rope
from .. import adapters, compat
from ..routed_layer import RoutedLayer


def problem(model: PreTrainedModel) -> str | None:
    """Return why kvloom cannot route a model.

    In transformers 5.10 these models see later tokens of a prompt. BigBird's sparse attention uses
    no cache.
    """
    if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
        return "its prompts are not causal in this transformers; install transformers 5.23"
    if getattr(compat.decoder(model), "attention_type", "original_full") != "original_full":
        return 'its attention is block-sparse; load it with attention_type="original_full"'
    return None


def rope(config: PreTrainedConfig) -> Rope | None:
    """Return how RoFormer rotates keys; None for the others, whose positions are learned.

    Raises `UnsupportedModel` if it rotates values too.
    """
    if config.model_type != "roformer":
        return None
    if config.rotary_value:
        raise UnsupportedModel(
            "roformer: it rotates its values, which kvloom does not move to other positions; use "
            'positions="original"'
        )
    dims = config.hidden_size // config.num_attention_heads
    return Rope(10000.0 ** -(torch.arange(0, dims, 2).float() / dims), interleaved=True)


def attend(
    module: Any,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    sinusoidal_pos: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`forward` of a `...SelfAttention` with a kvloom layer."""
    d = module.attention_head_size
    q, k, v = adapters.projected(hidden_states, d, module.query, module.key, module.value)
    if sinusoidal_pos is not None:
        rotate = module.apply_rotary_position_embeddings
        if module.rotary_value:
            q, k, v = rotate(sinusoidal_pos, q, k, v)
        else:
            q, k = rotate(sinusoidal_pos, q, k)
    return adapters.attend(layer, q, k, v, attention_mask, d**-0.5), None
