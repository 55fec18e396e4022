"""What a model is: its decoder, its layers and heads, and the cache layers of transformers for it.

Reads the model's class and config, and asks its adapter (`models`) first. Written against
transformers 5.10 to 5.23.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel, cache_utils

from ..recipe.geometry import Geometry, SlidingLayer
from . import models, shard

FULL, SLIDING, CROSS = "full_attention", "sliding_attention", "cross_attention"
UNEQUAL = object()
"""In place of an attribute in which layers differ."""

_OF_FULL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
"""What older transformers (5.10) call the attributes of Gemma 4's layers of full attention."""

_BIASED = ("inkling_text", "inkling2_text")
"""Models whose layers with keys, values and states add learned position biases in attention."""

_OWN_CACHES = ("minimax",)
"""Models that refuse caches of other classes than their own where `use_cache` is true."""

_DOUBLED_IN_WINDOWS = ("mimo_v2_flash",)
"""Models whose layers with a sliding window have twice the key/value heads that configs state."""

_WITHOUT_STATE = ("mlp", "moe")
"""Kinds of layers without attention that transformers 5.10 gives a cache layer nevertheless."""


def decoder_config(model: PreTrainedModel) -> Any:
    """Return the config of the text decoder, also of a multimodal model."""
    return model.config.get_text_config(decoder=True)


def max_positions(model: PreTrainedModel) -> int | None:
    """Return the positions of a model; None: its config names no limit."""
    return getattr(decoder_config(model), "max_position_embeddings", None)


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


@cache
def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a class's forward, which takes long to find."""
    return inspect.signature(forward)


def takes(module: torch.nn.Module, name: str) -> bool:
    """Return whether the forward of a module takes an argument of this name."""
    return name in signature_of(type(module).forward).parameters


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Run a module in evaluation mode; in the end, each part has its mode again."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules of a model's layers, in order; none if they are not one list."""
    count = layers_config(model).num_hidden_layers
    modules = decoder(model).modules()
    lists = [x for x in modules if isinstance(x, torch.nn.ModuleList) and len(x) == count]
    return list(lists[0]) if len(lists) == 1 else []


def _attribute(config: Any, name: str, layer_index: int | None = None) -> Any:
    """Return an attribute of attention; None if the config has none.

    layer_index: None: the layers of full attention, or `UNEQUAL` if these differ; without any, the
    first layer.
    """
    of_full = getattr(config, _OF_FULL.get(name, ""), None)
    is_full = of_full is not None and (
        layer_index is None or config.layer_types[layer_index] == FULL
    )
    if is_full and (name == "head_dim" or config.attention_k_eq_v):
        return of_full
    try:
        return getattr(config, name, None)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError: layers differ
        if layer_index is not None:
            return getattr(config.per_layer_config[layer_index], name, None)
        pairs = zip(config.per_layer_config, config.layer_types, strict=True)
        layers = [layer for layer, kind in pairs if kind == FULL] or [config.per_layer_config[0]]
        values = {getattr(layer, name, None) for layer in layers}
        return values.pop() if len(values) == 1 else UNEQUAL


def unequal_attribute(config: Any) -> str | None:
    """Return an attribute in which the layers of full attention differ; None if all are equal."""
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    return next((name for name in names if _attribute(config, name) is UNEQUAL), None)


def shared_layers(model: PreTrainedModel) -> set[int]:
    """Return the layers of full attention whose keys and values later layers attend to, too."""
    config = decoder_config(model)
    count = getattr(config, "num_kv_shared_layers", 0) or 0
    unshared = config.layer_types[: config.num_hidden_layers - count] if count else []
    return {max(i for i, x in enumerate(unshared) if x == FULL)} if FULL in unshared else set()


def has_alibi(config: Any) -> bool:
    """Return whether the model has ALiBi (arXiv:2108.12409) instead of positions."""
    adapter = models.adapter_of(config)
    if adapter is not None and adapter.alibi is not None:
        return adapter.alibi(config)
    return bool(getattr(config, "alibi", False))


def has_adapter(model: PreTrainedModel) -> bool:
    """Return whether `adapters` routes the model's attention modules."""
    return decoder_config(model).model_type in models.ADAPTERS


def geometry(model: PreTrainedModel) -> Geometry:
    """Return the geometry of a supported model; its layers are those of full attention.

    Its heads are those of this process, which may hold a part of the model (`shard`).
    """
    config, (rank, ranks) = layers_config(model), shard.heads_shard(model)
    q_heads, kv_heads = heads(config)
    stock = new_stock_layers(model)
    layer_indices = tuple(i for i, (kind, _) in enumerate(stock) if kind == FULL)
    geometry = Geometry(
        len(layer_indices), q_heads // ranks, kv_heads // ranks, _head_dim(config), model.dtype,
        has_alibi(config), None if len(layer_indices) == len(stock) else layer_indices, rank, ranks,
        _value_dim(config), bool(latent_dim(config)),
    )  # fmt: skip
    sliding = []
    for layer_index, (kind, layer) in enumerate(stock):
        if kind != SLIDING:
            continue
        q_heads, kv_heads = heads(config, layer_index)
        layer_geometry = replace(
            geometry, layers=1, q_heads=q_heads // ranks, kv_heads=kv_heads // ranks,
            head_dim=_head_dim(config, layer_index), cached=(layer_index,),
        )  # fmt: skip
        problem = _window_problem(config, layer_index, layer_geometry)
        sliding.append(SlidingLayer(layer_index, layer.sliding_window, layer_geometry, problem))
    return replace(geometry, sliding=tuple(sliding))


def _window_problem(config: Any, layer_index: int, geometry: Geometry) -> str:
    """Return why a layer with a sliding window cannot be packed; empty: it can."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type in models.ADAPTERS:
        return f"kvloom attends in place of {config.model_type}'s modules, and not in its windows"
    if kinds is not None and kinds[layer_index] == "chunked_attention":
        return "its window begins anew after every chunk of tokens"
    if geometry.latent:
        return "it stores latents (MLA)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "later layers attend to its keys and values"
    return ""


def heads(config: Any, layer_index: int | None = None) -> tuple[int, int]:
    """Return the query heads and the key/value heads of the whole model.

    layer_index: None: of the layers of full attention.
    """
    adapter = models.adapter_of(config)
    if adapter is not None and adapter.heads is not None:
        return adapter.heads(config)
    q_heads = _attribute(config, "num_attention_heads", layer_index)
    if latent_dim(config, layer_index):
        return q_heads, 1
    kv_heads = _attribute(config, "num_key_value_heads", layer_index) or q_heads
    if config.model_type in _DOUBLED_IN_WINDOWS and layer_index is not None:
        kv_heads *= 2 if config.layer_types[layer_index] == SLIDING else 1
    return q_heads, kv_heads


def _head_dim(config: Any, layer_index: int | None = None) -> int:
    """Return the channels of a key; layer_index: as for `heads`."""
    adapter = models.adapter_of(config)
    if adapter is not None and adapter.head_dim is not None:
        return adapter.head_dim(config)
    if latent_dim(config, layer_index):
        return _attribute(config, "qk_rope_head_dim", layer_index)
    head_dim = _attribute(config, "head_dim", layer_index)
    return head_dim or config.hidden_size // heads(config, layer_index)[0]


def _value_dim(config: Any) -> int | None:
    """Return the channels of a value; None: as many as of a key."""
    return latent_dim(config) or _attribute(config, "v_head_dim")


def latent_dim(config: Any, layer_index: int | None = None) -> int:
    """Return the channels of a latent, 0 for none; layer_index: as for `heads`."""
    return _attribute(config, "kv_lora_rank", layer_index) or 0


def has_tensors(x: Any) -> bool:
    """Return whether an argument is a tensor, or holds some."""
    if isinstance(x, Mapping):
        x = list(x.values())
    return isinstance(x, torch.Tensor) or (isinstance(x, list | tuple) and any(map(has_tensors, x)))


def layer_count(model: PreTrainedModel) -> int:
    """Return the number of layers that a model runs."""
    count: int = decoder_config(model).num_hidden_layers
    return count


_OF_NO_STATE = (
    "token_id", "_name_or_path", "transformers_version", "use_cache", "architectures", "dtype",
    "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id",
)  # fmt: skip
"""Ends of the names of config fields that change no key, value or state."""


def state_fields(model: PreTrainedModel) -> dict[str, Any]:
    """Return the fields of a model's config that may change a key, value or state."""
    fields = decoder_config(model).to_dict()
    return {name: x for name, x in fields.items() if not name.endswith(_OF_NO_STATE)}


def config_key(model: PreTrainedModel) -> dict[str, Any]:
    """Return what identifies a model's config: a cache is refused by a model with another."""
    name = getattr(decoder_config(model), "name_or_path", None)
    return {"name_or_path": name, **state_fields(model)}


def refuses_caches(model: PreTrainedModel) -> bool:
    """Return whether a model takes a cache of another class with use_cache=False only."""
    return decoder_config(model).model_type in _OWN_CACHES


def is_recording_mode(generation_mode: Any) -> bool:
    """Return whether generation may crop tokens (assisted decoding, prompt lookup)."""
    return "assisted" in str(getattr(generation_mode, "value", generation_mode)).lower()


def new_stock_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """Return the kind and a new cache layer that transformers itself would use for each layer."""
    config = layers_config(model)
    names = {"DynamicLayer": FULL, "DynamicSlidingWindowLayer": SLIDING}
    if config.model_type not in _BIASED:
        names["LinearAttentionAndFullAttentionLayer"] = FULL
    adapter = models.adapter_of(config)
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


def moves_positions(model: PreTrainedModel) -> bool:
    """Return whether the model moves later positions, by what it holds of its last prompt itself.

    Models with positions on several axes do, after images and padding.
    """
    moved_by = getattr(model.base_model, "rope_deltas", None)
    return isinstance(moved_by, torch.Tensor) and bool((moved_by != 0).any())


def stock_layers(model: PreTrainedModel) -> list[Any]:
    """Return a new cache layer that transformers itself would use for each layer."""
    return [layer for _, layer in new_stock_layers(model)]


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
