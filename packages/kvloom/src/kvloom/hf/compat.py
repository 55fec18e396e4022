"""Differences between models and between versions of transformers; no other module checks them.

Decides whether a model can be supported and what its layers are. Written against transformers
5.10 to 5.23.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from transformers import PreTrainedModel, cache_utils

from ..errors import UnsupportedModel
from ..recipe.geometry import Geometry
from . import shard
from .adapter_registry import ADAPTERS

FULL, SLIDING = "full_attention", "sliding_attention"

# Models that use the attention interface but do not cache what they attend to.
_REFUSED = {
    "jetmoe": "it repeats its keys before attention",
}


def decoder_config(model: PreTrainedModel) -> Any:
    """Return the config of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model's text decoder: the module that calls the layers."""
    found = model.get_decoder()
    if not isinstance(found, PreTrainedModel):  # ModernBERT's is its output layer
        found = model.base_model
    return found


def unwrap(model: Any) -> PreTrainedModel:
    """Return the transformers model inside the wrapper of `torch.compile` or peft, or `model`.

    Raises `UnsupportedModel` for peft's prefix tuning, which fills a cache of its own.
    """
    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # peft
            kind = getattr(getattr(model, "active_peft_config", None), "peft_type", "")
            if str(getattr(kind, "value", kind)) == "PREFIX_TUNING":
                raise UnsupportedModel(
                    f"{type(model).__name__} cannot be used with kvloom: prefix tuning gives every "
                    "call a cache of its own; merge the prefix, or use another adapter"
                )
            model = model.get_base_model()
        else:
            break
    return model


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel`, by name and with the reason, if attention cannot be routed."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"expected a transformers PreTrainedModel, got {type(model).__name__}"
        )
    config = decoder_config(model)
    reason = None
    if model.config.is_encoder_decoder:
        reason = "encoder-decoder models are not supported"
    elif not model.can_generate():
        reason = "it cannot generate: load it as a ...ForCausalLM"
    elif unequal := _unequal(config):
        reason = f"its layers differ in {unequal}"
    elif getattr(config, "num_attention_heads", None) is None:
        reason = "it has no attention, and so no keys and values"
    elif getattr(config, "kv_lora_rank", None):
        reason = "it caches latents instead of keys and values (MLA)"
    elif getattr(config, "num_kv_shared_layers", 0):
        reason = "some of its layers share the keys and values of others"
    elif config.model_type in _REFUSED:
        reason = _REFUSED[config.model_type]
    elif not adapted(model) and not model._can_set_attn_implementation():
        reason = "its attention does not go through transformers' attention interface"
    else:
        reason = shard.problem(model, *_heads(config))
    if reason:
        raise UnsupportedModel(f"{type(model).__name__} cannot be used with kvloom: {reason}")


def _unequal(config: Any) -> str | None:
    """Return an attribute of attention that the layers do not share; None if there is none."""
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        try:
            getattr(config, name, None)
        except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError
            return name
    return None


def has_alibi(config: Any) -> bool:
    """Return whether the model has ALiBi (arXiv:2108.12409) instead of positions."""
    return bool(config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False))


def adapted(model: PreTrainedModel) -> bool:
    """Return whether `adapters` routes the model's attention modules."""
    return decoder_config(model).model_type in ADAPTERS


def geometry(model: PreTrainedModel) -> Geometry:
    """Return the geometry of a supported model; its layers are those of full attention.

    Its heads are those of this process, which may hold a part of the model (`shard`).
    """
    config, (rank, ranks) = decoder_config(model), shard.shard(model)
    q_heads, kv_heads = _heads(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // q_heads
    kinds = [kind for kind, _ in stock_layers(config)]
    numbers = tuple(i for i, kind in enumerate(kinds) if kind == FULL)
    return Geometry(
        len(numbers), q_heads // ranks, kv_heads // ranks, head_dim, model.dtype,
        has_alibi(config), None if len(numbers) == len(kinds) else numbers, rank, ranks,
    )  # fmt: skip


def _heads(config: Any) -> tuple[int, int]:
    """Return the query heads and the key/value heads of the whole model."""
    q_heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or q_heads
    if config.model_type == "falcon":
        one = config.multi_query and not config.new_decoder_architecture
        kv_heads = 1 if one else config.num_kv_heads
    return q_heads, kv_heads


def fingerprint(config: Any) -> tuple:
    """Return what identifies a model's config: a cache is refused by a model with another."""
    names = ("model_type", "name_or_path", "num_hidden_layers", "hidden_size", "vocab_size")
    return tuple(getattr(config, name, None) for name in names)


def is_recording_mode(generation_mode: Any) -> bool:
    """Return whether generation may crop tokens (assisted decoding, prompt lookup)."""
    return "assisted" in str(getattr(generation_mode, "value", generation_mode)).lower()


def stock_layers(config: Any) -> list[tuple[str, Any]]:
    """Return the (type, new cache layer) that transformers itself would use for each layer.

    The type is `FULL`, `SLIDING`, or the name of the class that transformers picks.
    """
    names = {"DynamicLayer": FULL, "DynamicSlidingWindowLayer": SLIDING}
    layers = cache_utils.DynamicCache(config=config).layers
    if not layers:  # a config without layer types: every layer attends to everything
        return [(FULL, None)] * config.num_hidden_layers
    return [(names.get(type(layer).__name__, type(layer).__name__), layer) for layer in layers]


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """Return the kinds of layers of a model, as its config names them."""
    config = decoder_config(model)
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return set(named or (kind for kind, _ in stock_layers(config)))


def is_croppable(layer: Any) -> bool:
    """Return whether tokens can be taken back out of a cache layer of transformers."""
    stateful = isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin)
    return bool(getattr(layer, "is_croppable", not stateful))


def padding_mask(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return a 2-D mask [B, n] as bool [B, tokens]: cut or filled with False, as transformers."""
    mask = mask.bool()
    if mask.shape[-1] < tokens:
        mask = torch.nn.functional.pad(mask, (0, tokens - mask.shape[-1]))
    return mask[:, :tokens]


@lru_cache
def last_logits_option(forward: Callable[..., Any]) -> dict[str, int]:
    """Return the keyword argument that computes the last logits only, where the model has it.

    The logits of a whole prompt may take more memory than its cache.
    """
    supported = "logits_to_keep" in inspect.signature(forward).parameters
    return {"logits_to_keep": 1} if supported else {}
