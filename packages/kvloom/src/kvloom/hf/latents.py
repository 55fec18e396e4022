"""Latent attention (MLA) of transformers' models, through kvloom's layers.

transformers caches a latent and a positional part, and expands all of them at every step
(`expand_kv` of the attention module). kvloom stores both parts, absorbs the expanding weights into
the queries, and expands what attention returns; a first prompt attends as in transformers. Decides
which models this covers.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn


def problem(config: Any, decoder: nn.Module) -> str | None:
    """Return why kvloom cannot store the latents of a decoder; None if it can."""
    modules: list[Any] = [m for m in decoder.modules() if hasattr(m, "expand_kv")]
    if getattr(config, "index_topk", None):
        return (
            "its attention is sparse: an indexer chooses the tokens of a step by keys of its own "
            "(DeepSeek sparse attention), which kvloom does not store"
        )
    if not modules:
        return (
            "it has latents (MLA), which this version of transformers caches expanded; use "
            "transformers 5.23"
        )
    if not all(_absorbable(m.kv_b_proj) for m in modules):
        return (
            "kvloom reads the weight that expands its latents, and finds more than a weight (an "
            "adapter, quantized or offloaded weights); merge the adapter, and keep kv_b_proj "
            "unquantized and in memory"
        )
    return None


def _absorbable(linear: nn.Module) -> bool:
    """Return whether a module is a product with its weight, which is in memory."""
    offloaded = getattr(getattr(linear, "_hf_hook", None), "offload", False)  # by accelerate
    return type(linear) is nn.Linear and linear.bias is None and not offloaded


expanding = threading.local()
"""layer: a weak reference to the one whose latents the model of this thread expands.

Other layers mark their key, as layers that share keys attend without an `update` of their own. The
mark on a latent would be lost where the model expands it.
"""


def expanding_layer(module: nn.Module) -> Any:
    """Return the layer whose latents a module has expanded; None if it attends to none."""
    reference = getattr(expanding, "layer", None)
    layer = None if reference is None else reference()
    waits = layer is not None and layer.latents is not None and hasattr(module, "expand_kv")
    return layer if waits else None


def absorb(module: Any, query: Tensor) -> Tensor:
    """Return absorbed queries [B, Hq, T, p + r] of a model's queries [B, Hq, T, n + p].

    The last p channels have a position. The others are multiplied with the weights that expand
    latents to keys.
    """
    to_keys, _ = _weights(module)
    n = to_keys.shape[1]
    rest, positional = query[..., :n], query[..., n:]
    return torch.cat([positional, rest @ to_keys], dim=-1)


def expand(module: Any, out: Tensor) -> Tensor:
    """Return the output of each head [B, Hq, T, v] of attention to latents, [B, Hq, T, r]."""
    _, to_values = _weights(module)
    return out @ to_values.transpose(-1, -2)


def _weights(module: Any) -> tuple[Tensor, Tensor]:
    """Return the weights that expand a latent to keys [Hq, n, r] and to values [Hq, v, r]."""
    weight, n, v = module.kv_b_proj.weight, module.qk_nope_head_dim, module.v_head_dim
    to_keys, to_values = weight.view(-1, n + v, weight.shape[-1]).split([n, v], dim=1)
    return to_keys, to_values
