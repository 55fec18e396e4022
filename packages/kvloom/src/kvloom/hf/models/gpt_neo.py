"""GPT-Neo: logits without a scale; every other layer attends to a window of tokens.

transformers' own sliding cache serves the layers with a window.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GPTNeoConfig
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from .. import adapters
from ..implementation import stock_implementation
from ..routed_layer import RoutedLayer


def windows(config: GPTNeoConfig) -> list[int | None]:
    """Return the window of each layer; None for all tokens.

    Flash attention of transformers leaves the windows out.
    """
    kinds = config.attention_layers[: config.num_layers]
    if "flash" in stock_implementation(config):
        return [None] * len(kinds)
    return [config.window_size if kind == "local" else None for kind in kinds]


def attend(
    module: GPTNeoSelfAttention,
    layer: RoutedLayer,
    hidden_states: Tensor,
    *,
    attention_mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """`GPTNeoSelfAttention.forward` with a kvloom layer."""
    projections = module.q_proj, module.k_proj, module.v_proj
    q, k, v = adapters.projected(hidden_states, module.head_dim, *projections)
    out = adapters.attend(layer, q, k, v, attention_mask, 1.0)
    return module.resid_dropout(module.out_proj(out)), None
