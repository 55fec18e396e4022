"""What kvloom must know of a model's class and config, and of the version of transformers.

Decides whether a model can be supported, what its layers are, and which model types have an
adapter: those whose attention bypasses transformers' attention interface, or attends to other heads
than it stores. `models.ADAPTED` lists the built-in adapters, which are imported when a model needs
them; `adapters` installs them. An adapter also says what else its model type does in its own way.
Written against transformers 5.10 to 5.23.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.masking_utils import causal_mask_function

from ..errors import UnsupportedModel
from ..positions.rope import Rope
from ..recipe.geometry import Geometry, SlidingLayer
from ..registry import Registry
from . import latents, models, shard

FULL, SLIDING, CROSS = "full_attention", "sliding_attention", "cross_attention"
UNEQUAL = object()
"""In place of an attribute in which layers differ."""

_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""What older transformers (5.10) call the attributes of Gemma 4's layers of full attention."""

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

_BIASED = ("inkling_text", "inkling2_text")
"""Models whose layers with keys, values and states add learned position biases in attention."""

_OWN_CACHES = ("minimax",)
"""Models that refuse caches of other classes than their own where `use_cache` is true."""

_DOUBLED_IN_WINDOWS = ("mimo_v2_flash",)
"""Models whose layers with a sliding window have twice the key/value heads that configs state."""

_WITHOUT_STATE = ("mlp", "moe")
"""Kinds of layers without attention that transformers 5.10 gives a cache layer nevertheless."""


class Adapter(NamedTuple):
    """How to route one model type, and what its config does not say in the usual way.

    Attributes:
        attention: The class of its attention modules.
        attend: Replaces their forward.
        alibi, heads, head_dim, rope, windows, problem: As the arguments of `register`; None: the
            model does as others do.
    """

    attention: type
    attend: Callable[..., tuple]
    alibi: Callable[[Any], bool] | None = None
    heads: Callable[[Any], tuple[int, int]] | None = None
    head_dim: Callable[[Any], int] | None = None
    rope: Callable[[Any], Rope | None] | None = None
    windows: Callable[[Any], list[int | None]] | None = None
    problem: Callable[[PreTrainedModel], str | None] | None = None


def _built_in(model_type: str) -> Adapter:
    file, attention = models.ADAPTED[model_type]
    module = import_module(f".models.{file}", __package__)
    folder = model_type.replace("-", "_")
    modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
    optional = {name: getattr(module, name, None) for name in Adapter._fields[2:]}
    return Adapter(getattr(modeling, attention), module.attend, **optional)


ADAPTERS: Registry[Callable[[], Adapter]] = Registry(
    "model adapter",
    {model_type: partial(_built_in, model_type) for model_type in models.ADAPTED},
)


def register(
    model_type: str,
    attention: type,
    *,
    alibi: Callable[[Any], bool] | None = None,
    heads: Callable[[Any], tuple[int, int]] | None = None,
    head_dim: Callable[[Any], int] | None = None,
    rope: Callable[[Any], Rope | None] | None = None,
    windows: Callable[[Any], list[int | None]] | None = None,
    problem: Callable[[PreTrainedModel], str | None] | None = None,
) -> Callable[[Any], Any]:
    """Register a function as the attention of a model type; a decorator.

    The function is called with the module, its `RoutedLayer` and the arguments of the module's
    forward, whose result it returns. It attends through `adapters.attend`.

    Args:
        model_type: As in the model's config.
        attention: The class of the model's attention modules.
        alibi: Called with the config; returns whether the model has ALiBi instead of positions.
            None: the config has a true `alibi`, or the model has none.
        heads: Called with the config; returns the query heads and the key/value heads of a layer.
            None: the config's `num_attention_heads` and `num_key_value_heads`.
        head_dim: Called with the config; returns the size of a key/value head. None: the config's
            `head_dim`, or its hidden size divided by the query heads.
        rope: Called with the config; returns how the model rotates keys, or None if it does not.
            None: kvloom finds it in the model's modules.
        windows: Called with the config; returns each layer's sliding window, or None for a layer
            that attends to all tokens. None: the layers that the config names.
        problem: Called with the model; returns why it cannot be routed and a remedy, or None.

    Returns:
        The decorator, which returns the function.

    Raises:
        RecipeError: The model type has an adapter already.
    """

    def decorate(attend: Callable[..., tuple]) -> Callable[..., tuple]:
        adapter = Adapter(attention, attend, alibi, heads, head_dim, rope, windows, problem)
        ADAPTERS.register(lambda: adapter, name=model_type)
        return attend

    return decorate


def decoder_config(model: PreTrainedModel) -> Any:
    """Return the config of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def layers_config(model: PreTrainedModel) -> Any:
    """Return a config whose layers and heads are those of the decoder; not one to change.

    Where the config of an encoder and a decoder (BART) belongs to a decoder alone, its number of
    layers is still the encoder's: transformers' own view of the decoder corrects it.
    """
    config = decoder_config(model)
    if (
        config.is_encoder_decoder
        or config.attribute_map.get("num_hidden_layers") != "encoder_layers"
    ):
        return config
    encoder_decoder = copy.deepcopy(config)
    encoder_decoder.is_encoder_decoder = True
    return encoder_decoder.get_text_config(decoder=True)


def decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model's text decoder: the module that calls the layers."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBERT's is its output layer
        decoder = model.base_model
    return decoder


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules of a model's layers, in order; none if they are not one list."""
    count = layers_config(model).num_hidden_layers
    modules = decoder(model).modules()
    lists = [x for x in modules if isinstance(x, torch.nn.ModuleList) and len(x) == count]
    return list(lists[0]) if len(lists) == 1 else []


def unwrap(model: Any) -> PreTrainedModel:
    """Unwrap a model from `torch.compile` and peft, and refuse one that kvloom cannot route.

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
            f"expected a transformers PreTrainedModel, got {type(model).__name__}"
        )
    config = layers_config(model)
    reason = None
    if model.config.is_encoder_decoder:
        reason = "encoder-decoder models are not supported"
    elif not model.can_generate():
        reason = "it cannot generate: load it as a ...ForCausalLM"
    elif unequal := _unequal(config):
        reason = f"its layers of full attention differ in {unequal}"
    elif _heads(config)[0] is None:
        reason = "it has no attention, and so no keys and values"
    elif problem := _problem(model, config):
        reason = problem
    elif not has_adapter(model) and not decoder(model)._can_set_attn_implementation():
        reason = (
            "its attention does not go through transformers' attention interface; register an "
            "adapter of your own by kvloom.register_adapter"
        )
    else:
        reason = shard.problem(model, *_heads(config))
    if reason:
        raise UnsupportedModel(f"{type(model).__name__} cannot be used with kvloom: {reason}")
    if all_heads_for is not None:
        shard.needs_whole(model, all_heads_for)
    return model


def _problem(model: PreTrainedModel, config: Any) -> str | None:
    """Return what kvloom does not compute of a model's attention; None if it computes all of it."""
    adapter = adapter_of(config)
    if config.model_type in _REFUSED:
        return _REFUSED[config.model_type]
    if adapter is not None and adapter.problem is not None:
        return adapter.problem(model)
    if _latent_dim(config) and _has_full_layers(config):
        return latents.problem(config, decoder(model))
    return None


def _attribute(config: Any, name: str, number: int | None = None) -> Any:
    """Return an attribute of attention; None if the config has none.

    number: of a layer; None: the layers of full attention, or `UNEQUAL` if these differ; without
    any, the first layer.
    """
    of_full = getattr(config, _OF_FULL.get(name, ""), None)
    is_full = of_full is not None and (number is None or config.layer_types[number] == FULL)
    if is_full and (name == "head_dim" or config.attention_k_eq_v):
        return of_full
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError: layers differ
        if number is not None:
            return getattr(config.per_layer_config[number], name, None)
        pairs = zip(config.per_layer_config, config.layer_types, strict=True)
        layers = [layer for layer, kind in pairs if kind == FULL] or [config.per_layer_config[0]]
        values = {getattr(layer, name, None) for layer in layers}
        return values.pop() if len(values) == 1 else UNEQUAL


def _unequal(config: Any) -> str | None:
    """Return an attribute in which the layers of full attention differ; None if all are equal."""
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    return next((name for name in names if _attribute(config, name) is UNEQUAL), None)


def shared_layers(model: PreTrainedModel) -> set[int]:
    """Return the layers of full attention whose keys and values later layers attend to, too."""
    config = decoder_config(model)
    count = getattr(config, "num_kv_shared_layers", 0) or 0
    before = config.layer_types[: config.num_hidden_layers - count] if count else []
    return {max(i for i, kind in enumerate(before) if kind == FULL)} if FULL in before else set()


def has_alibi(config: Any) -> bool:
    """Return whether the model has ALiBi (arXiv:2108.12409) instead of positions."""
    adapter = adapter_of(config)
    if adapter is not None and adapter.alibi is not None:
        return adapter.alibi(config)
    return bool(getattr(config, "alibi", False))


def adapter_of(config: Any) -> Adapter | None:
    """Return the adapter of a decoder's config; None if its model type has none."""
    new_adapter = ADAPTERS.get(config.model_type)
    return None if new_adapter is None else new_adapter()


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether `adapters` routes the model's attention modules."""
    return decoder_config(model).model_type in ADAPTERS


def geometry(model: PreTrainedModel) -> Geometry:
    """Return the geometry of a supported model; its layers are those of full attention.

    Its heads are those of this process, which may hold a part of the model (`shard`).
    """
    config, (rank, ranks) = layers_config(model), shard.heads_shard(model)
    q_heads, kv_heads = _heads(config)
    stock = new_stock_layers(model)
    numbers = tuple(i for i, (kind, _) in enumerate(stock) if kind == FULL)
    geometry = Geometry(
        len(numbers), q_heads // ranks, kv_heads // ranks, _head_dim(config), model.dtype,
        has_alibi(config), None if len(numbers) == len(stock) else numbers, rank, ranks,
        _value_dim(config), bool(_latent_dim(config)),
    )  # fmt: skip
    sliding = []
    for number, layer in ((i, layer) for i, (kind, layer) in enumerate(stock) if kind == SLIDING):
        q_heads, kv_heads = _heads(config, number)
        alone = replace(
            geometry, layers=1, q_heads=q_heads // ranks, kv_heads=kv_heads // ranks,
            head_dim=_head_dim(config, number), layer_numbers=(number,),
        )  # fmt: skip
        problem = _window_problem(config, number, alone)
        sliding.append(SlidingLayer(number, layer.sliding_window, alone, problem))
    return replace(geometry, sliding=tuple(sliding))


def _window_problem(config: Any, number: int, geometry: Geometry) -> str:
    """Return why a layer with a sliding window cannot be packed; empty: it can."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type in ADAPTERS:
        return f"kvloom attends in place of {config.model_type}'s modules, and not in its windows"
    if kinds is not None and kinds[number] == "chunked_attention":
        return "its window begins anew after every chunk of tokens"
    if geometry.latent:
        return "it stores latents (MLA)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "later layers attend to its keys and values"
    return ""


def _heads(config: Any, number: int | None = None) -> tuple[int, int]:
    """Return the query heads and the key/value heads of the whole model.

    number: of a layer; None: of the layers of full attention.
    """
    adapter = adapter_of(config)
    if adapter is not None and adapter.heads is not None:
        return adapter.heads(config)
    q_heads = _attribute(config, "num_attention_heads", number)
    if _latent_dim(config, number):
        return q_heads, 1
    kv_heads = _attribute(config, "num_key_value_heads", number) or q_heads
    if config.model_type in _DOUBLED_IN_WINDOWS and number is not None:
        kv_heads *= 2 if config.layer_types[number] == SLIDING else 1
    return q_heads, kv_heads


def _head_dim(config: Any, number: int | None = None) -> int:
    """Return the channels of a key; number: as for `_heads`."""
    adapter = adapter_of(config)
    if adapter is not None and adapter.head_dim is not None:
        return adapter.head_dim(config)
    if _latent_dim(config, number):
        return _attribute(config, "qk_rope_head_dim", number)
    head_dim = _attribute(config, "head_dim", number)
    return head_dim or config.hidden_size // _heads(config, number)[0]


def _value_dim(config: Any) -> int | None:
    """Return the channels of a value; None: as many as of a key."""
    return _latent_dim(config) or _attribute(config, "v_head_dim")


def _latent_dim(config: Any, number: int | None = None) -> int:
    """Return the channels of a latent, 0 for none; number: as for `_heads`."""
    return _attribute(config, "kv_lora_rank", number) or 0


def fingerprint(model: PreTrainedModel) -> tuple:
    """Return what identifies a model's config: a cache is refused by a model with another."""
    config = decoder_config(model)
    names = ("model_type", "name_or_path", "num_hidden_layers", "hidden_size", "vocab_size")
    return tuple(getattr(config, name, None) for name in names)


def refuses_caches(model: PreTrainedModel) -> bool:
    """Return whether a model takes a cache of another class with use_cache=False only."""
    return decoder_config(model).model_type in _OWN_CACHES


def is_recording_mode(generation_mode: Any) -> bool:
    """Return whether generation may crop tokens (assisted decoding, prompt lookup)."""
    return "assisted" in str(getattr(generation_mode, "value", generation_mode)).lower()


def new_stock_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the kind and a new cache layer that transformers itself would use for each layer."""
    return _new_stock_layers(layers_config(model))


def _new_stock_layers(config: Any) -> list[tuple[str, Any]]:
    names = {"DynamicLayer": FULL, "DynamicSlidingWindowLayer": SLIDING}
    if config.model_type not in _BIASED:
        names["LinearAttentionAndFullAttentionLayer"] = FULL
    adapter = adapter_of(config)
    if adapter is not None and adapter.windows is not None:
        layers = [_new_layer(window) for window in adapter.windows(config)]
    else:
        layers = cache_utils.DynamicCache(config=config).layers
    if not layers:  # a config without layer types: every layer attends to everything
        return [(FULL, cache_utils.DynamicLayer()) for _ in range(config.num_hidden_layers)]
    if not hasattr(cache_utils, "DummyLayer"):
        kinds = getattr(config, "layer_types", None) or []
        for i in (i for i, kind in enumerate(kinds) if kind in _WITHOUT_STATE):
            layers[i] = cache_utils.LinearAttentionLayer()  # which stays empty
    stock = [(names.get(type(layer).__name__, type(layer).__name__), layer) for layer in layers]
    for i in getattr(config, "cross_attention_layers", None) or ():  # to the tokens of images
        stock[i][1].is_croppable = False
        stock[i] = CROSS, stock[i][1]
    return stock


def _has_full_layers(config: Any) -> bool:
    return any(kind == FULL for kind, _ in _new_stock_layers(config))


def _new_layer(window: int | None) -> Any:
    """Return a new cache layer of transformers for a sliding window; None: for all tokens."""
    if window is None:
        return cache_utils.DynamicLayer()
    return cache_utils.DynamicSlidingWindowLayer(sliding_window=window)


def stock_kinds(model: PreTrainedModel) -> list[str]:
    """Return the kind of each layer.

    It is "full_attention", "sliding_attention", "cross_attention", or the name of the class of
    transformers that stores the layer.
    """
    return [kind for kind, _ in new_stock_layers(model)]


def layer_kinds(model: PreTrainedModel) -> set[str]:
    """Return the kinds of layers of a model, as its config names them."""
    config = decoder_config(model)
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    return set(layer_types or (kind for kind, _ in new_stock_layers(model)))


def is_plainly_causal(
    config: Any, mask_function: Callable[..., Any], model_reads_no_mask: bool
) -> bool:
    """Return whether a token sees all earlier tokens that are not padding, and no others.

    mask_function: as transformers makes masks from it. model_reads_no_mask: whether the model
    itself reads no mask; an adapter reads it in the model's place.
    """
    if config.model_type == "falcon":  # transformers 5.10 adds a function that is always true
        return True
    is_causal = mask_function is causal_mask_function
    return is_causal and (model_reads_no_mask or config.model_type in ADAPTERS)


def padding_mask(mask: Tensor, tokens: int) -> Tensor:
    """Return a 2-D mask [B, n] as bool [B, tokens]: cut or filled with False, as transformers."""
    mask = mask.bool()
    if mask.shape[-1] < tokens:
        mask = torch.nn.functional.pad(mask, (0, tokens - mask.shape[-1]))
    return mask[:, :tokens]


def read_tokens(
    model: PreTrainedModel, ids: Tensor, cache: Any, all_logits: bool = False
) -> Tensor:
    """Append tokens to a kvloom cache by one forward pass, and return logits.

    Args:
        model: The model of the cache.
        ids: int64 [B, T].
        cache: A `Cache`, or several of them `Together`.
        all_logits: Whether to return the logits of all T positions.

    Returns:
        The logits of the last position [B, V], or of all positions [B, T, V].
    """
    if not all_logits:
        return last_logits(model, cache, input_ids=ids)
    logits: Tensor = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return logits


def last_logits(model: PreTrainedModel, cache: Any, **inputs: Any) -> Tensor:
    """Run one forward pass with a cache, and return the logits of the last position [B, V].

    The logits of a whole prompt may take more memory than its cache, so the model computes the last
    ones alone where it can.
    """
    last_only = {"logits_to_keep": 1} if _takes_logits_to_keep(type(model).forward) else {}
    out = model(past_key_values=cache, use_cache=True, **inputs, **last_only)
    logits: Tensor = out.logits[:, -1]
    return logits


@lru_cache
def _takes_logits_to_keep(forward: Callable[..., Any]) -> bool:
    return "logits_to_keep" in inspect.signature(forward).parameters
