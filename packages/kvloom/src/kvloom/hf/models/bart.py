"""MVP, TrOCR, XGLM: decoders with the attention of BART; positions are added to embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .. import adapters
from ..routed_layer import RoutedLayer


def problem(model: PreTrainedModel) -> str | None:
    """Return why kvloom cannot route a model: MVP's prompts are keys that no cache stores."""
    if not getattr(model.config, "use_prompt", False):
        return None
    return "each layer attends to a learned prompt too; load it with use_prompt=False"


def attend(
    module: Any, layer: RoutedLayer, hidden_states: Tensor, *, attention_mask: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """`forward` of an attention module with a kvloom layer."""
    projections = module.q_proj, module.k_proj, module.v_proj
    q, k, v = adapters.projected(hidden_states, module.head_dim, *projections)
    return module.out_proj(adapters.attend(layer, q, k, v, attention_mask, module.scaling)), None
