"""Which models kvloom refuses, and why."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from . import compat, latents, models, shard

_SOUND = "each of its tokens is a row of input_ids for every codebook of sound"
_DISTANCE = "its attention adds a learned bias for the distance of two tokens"
_REFUSED = {
    "cpmant": _DISTANCE,
    "doge": "its attention adds a bias from a token's value, and hides the tokens of small biases",
    "git": "its attention does not go through transformers' attention interface",
    "kosmos_2_text_model": "it makes masks of its own, which kvloom does not compute",
    "musicgen_decoder": _SOUND,
    "musicgen_melody_decoder": _SOUND,
    "openai-gpt": "it has no KV cache",
    "prophetnet": _DISTANCE,
    "recurrent_gemma": (
        "it keeps its recurrent states in its modules, where a cache cannot restore, copy or "
        "reorder them"
    ),
    "reformer": "it caches hidden states and their hashes instead of keys and values",
    "xlm": "its generate() computes all tokens again at every step, without a KV cache",
    "xlnet": "it caches hidden states instead of keys and values",
}
"""Why models of these types cannot be used."""
_PREFIXES = "PREFIX_TUNING", "CARTRIDGE"
"""Adapters of peft that are keys and values."""


def unwrap(model: Any) -> PreTrainedModel:
    """Return the model inside the wrappers of `torch.compile` and peft.

    Raises `UnsupportedModel` for peft's prefix tuning, which fills a cache of its own.
    """
    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # peft
            kind = getattr(getattr(model, "active_peft_config", None), "peft_type", "")
            if str(getattr(kind, "value", kind)) in _PREFIXES:
                raise UnsupportedModel(
                    f"{type(model).__name__} cannot be used with kvloom: prefix tuning gives every "
                    "call a cache of its own; use another adapter"
                )
            model = model.get_base_model()
        else:
            break
    return model


def supported_model(model: PreTrainedModel, all_heads_for: str | None = None) -> PreTrainedModel:
    """Unwrap a model from `torch.compile` and peft, and refuse one that kvloom cannot route.

    Args:
        model: Any model.
        all_heads_for: What needs all heads of the model, as the subject of a sentence; None:
            nothing does.

    Raises:
        UnsupportedModel: kvloom cannot route its attention, or this process holds a part of the
            heads only.
    """
    model = unwrap(model)
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"expected a transformers PreTrainedModel, got {type(model).__name__}; give the model "
            "first, loaded by AutoModelForCausalLM.from_pretrained"
        )
    config = compat.layers_config(model)
    reason = None
    if model.config.is_encoder_decoder:
        reason = "encoder-decoder models are not supported"
    elif not model.can_generate():
        reason = "it cannot generate: load it as a ...ForCausalLM"
    elif unequal := compat.unequal_attribute(config):
        reason = f"its layers of full attention differ in {unequal}"
    elif compat.heads(config)[0] is None:
        reason = "it has no attention, and so no keys and values"
    elif problem := _problem(model, config):
        reason = problem
    elif getattr(config, "add_cross_attention", False):
        reason = "it attends to an encoder (add_cross_attention), and keeps a cache for that"
    elif not compat.has_adapter(model) and not compat.decoder(model)._can_set_attn_implementation():
        reason = (
            "its attention does not go through transformers' attention interface; register an "
            "adapter of your own by kvloom.register_adapter"
        )
    else:
        reason = shard.problem(model, *compat.heads(config))
    if reason:
        raise UnsupportedModel(f"{type(model).__name__} cannot be used with kvloom: {reason}")
    if all_heads_for is not None:
        shard.needs_whole(model, all_heads_for)
    return model


def _problem(model: PreTrainedModel, config: Any) -> str | None:
    """Return what kvloom does not compute of a model's attention; None if it computes all of it."""
    adapter = models.adapter_of(config)
    if config.model_type in _REFUSED:
        return _REFUSED[config.model_type]
    if adapter is not None and adapter.problem is not None:
        return adapter.problem(model)
    if compat.latent_dim(config) and compat.FULL in compat.stock_kinds(model):
        return latents.problem(config, compat.decoder(model))
    return None
