"""What tools need of a model: whether kvloom supports it, what it caches, and a forward pass."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from . import compat, shard
from .routed import RoutedCache


def supported_model(model: PreTrainedModel, whole: str | None = None) -> PreTrainedModel:
    """Return the transformers model inside the wrapper of `torch.compile` or peft, or `model`.

    Args:
        model: Any model.
        whole: What needs all heads of the model, as the subject of a sentence; None: nothing does.

    Raises:
        UnsupportedModel: kvloom cannot route its attention, or this process holds a part of the
            heads only.
    """
    model = compat.unwrap(model)
    compat.refuse_unsupported(model)
    if whole is not None:
        shard.needs_whole(model, whole)
    return model


def stock_layers(model: PreTrainedModel) -> list[tuple[str, int | None]]:
    """Return what transformers itself stores in each layer: a kind, and the tokens of a window.

    The kind is "full_attention", "sliding_attention", or the name of the class that transformers
    picks; only sliding attention has a window.
    """
    layers = compat.stock_layers(compat.decoder_config(model))
    return [
        (kind, layer.sliding_window if kind == compat.SLIDING else None) for kind, layer in layers
    ]


def read_tokens(
    model: PreTrainedModel, ids: Tensor, cache: RoutedCache, every: bool = False
) -> Tensor:
    """Append tokens to a kvloom cache by one forward pass, and return logits.

    Args:
        model: The model of the cache.
        ids: int64 [B, T].
        cache: A `Cache`, or several of them `Together`.
        every: Whether to return the logits of all T positions.

    Returns:
        The logits of the last position [B, V], or of all positions [B, T, V].
    """
    last_only = {} if every else compat.last_logits_option(type(model).forward)
    out = model(input_ids=ids, past_key_values=cache, use_cache=True, **last_only)
    logits: Tensor = out.logits if every else out.logits[:, -1]
    return logits
