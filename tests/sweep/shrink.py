"""Small configs of any model of transformers, by the names of their fields.

A config keeps one layer of each kind that its default has, and the ratio of heads, experts and
groups where a model depends on it. `by_hand` has what names alone cannot give.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from typing import Any

from by_hand import CHANGES
from transformers import CONFIG_MAPPING, PreTrainedConfig

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 64, 4, 2, 16, 199
WINDOW = 16
LAYERS = 3

# The first pattern that matches the whole name of an integer field gives its small value.
_SMALL = [
    # tokens and positions
    (r"(unpadded_)?vocab_size(_per_layer_input)?|n_vocab|\w*_vocab_size", VOCABULARY),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions|"
     r"max_source_positions|model_max_length|context_length|original_max_position_embeddings", 1024),
    (r"sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention|"
     r"local_attention_window_len|window_size|local_window\w*|keep_window_size", WINDOW),
    # experts
    (r"n_routed_experts|(moe_)?num_(local_)?experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|moe_topk", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"n_group|num_expert_group|topk_group", 1),
    (r"\w*(moe|expert|shared)\w*_(intermediate|ffn_hidden)_size|share_expert_dim", 32),
    # heads and widths of attention
    (r"(swa_)?num_(key_value|kv)_heads|kv_n_heads", KV_HEADS),
    (r"\w*(num|n)_(\w+_)?heads?|\w*attention_heads|encoder_heads|num_query_groups", HEADS),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"\w*head_dim|v_head_dim|d_kv|d_head|kv_channels|dim_head|attention_head_size|"
     r"\w*headdim|linear_(key|value)_head_dim|mamba_d_head", HEAD_DIM),
    (r"(q|kv|o)_lora_rank", 32),
    (r"o_groups", 2),
    # indexers
    (r"index_n_heads|indexer_n_heads", 2),
    (r"index_topk", 8),
    # states
    (r"mamba_d_state|state_size|ssm_state_size", 16),
    (r"\w*chunk_size", 8),
    (r"mamba_dt_rank|time_step_rank", 4),
    # layers
    (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|layers|"
     r"num_blocks|depth", LAYERS),
    (r"num_layers_per_stack", 2),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    # widths
    (r"\w*(intermediate|ffn_hidden|inner)_size|\w*_ffn_dim|ffn_dim|d_ff|dff|dim_ff|n_inner|mlp_dim|d_inner|"
     r"dense_intermediate_size|feed_forward_size|intermediate_size_mlp", 96),
    (r"\w*hidden_size\w*|d_model|n_embd|\w*embedding_size|embedding_dim|emb_dim|embed_dim|\w*_embed_dim|lru_width|"
     r"word_embed_proj_dim|\w*projection_dim|projector_(in|out)put_dim|vision_output_dim|output_dim|adapter_out_dim|"
     r"pooler_output_size|mamba_d_ssm", HIDDEN),
    # images
    (r"image_size|img_size", 32),
    (r"patch_size", 16),
]  # fmt: skip
SMALL = [(re.compile(pattern), value) for pattern, value in _SMALL]
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
# Fields that a model needs at another value than its default to be a causal model with a cache.
FIXED = {"is_decoder": True, "use_cache": True, "add_cross_attention": False}


def config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the small config of a model type; `changes` replace fields."""
    return shrink(CONFIG_MAPPING[model_type](), **changes)


def shrink(default: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """Return a small config of the class of `default`, with shrunk parts."""
    cls = type(default)
    changes = {**CHANGES.get(cls.model_type, {}), **changes}
    values: dict[str, Any] = {}
    for name, declared in _declared(cls).items():
        value = _read(default, name)
        if isinstance(value, PreTrainedConfig):
            part = changes.get(name)
            if not isinstance(part, PreTrainedConfig):
                values[name] = shrink(value, **(part or {}))
        elif name in FIXED and value is not None:
            values[name] = FIXED[name]
        elif name in IDS:
            values[name] = IDS[name]
        elif declared is not None and _is_int(value):
            values[name] = small(name, value)
    for name in [n for n in values if n.endswith("_token_id") or n.endswith("_token_index")]:
        if name not in IDS:
            values.pop(name)
    values |= _token_ids(cls, default) | _layers(default, values) | _heads(default, values)
    values |= _rope(default, values)
    values |= {k: v for k, v in changes.items() if not isinstance(v, dict) or k not in values}
    return cls(**values)


def _read(config: PreTrainedConfig, name: str) -> Any:
    """Return a field, or its declared default where it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return _declared(type(config))[name]


def _heads(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, int]:
    """Return as many key/value heads as heads where the default has as many, and a head_dim."""
    found = {}
    for prefix in ("", "swa_"):
        q, kv = prefix + "num_attention_heads", prefix + "num_key_value_heads"
        if kv in _declared(type(default)) and _read(default, kv) is None:
            found[kv] = KV_HEADS
        elif kv in values and _read(default, q) == _read(default, kv):
            found[kv] = values[q]
    if "head_dim" in _declared(type(default)) and _read(default, "head_dim") is None:
        found["head_dim"] = HEAD_DIM
    return found


def _rope(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return rotary parameters whose sections fit the small heads."""
    rope = _read(default, "rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    head_dim = _read(default, "head_dim") or default.hidden_size // default.num_attention_heads
    sections, share = rope["mrope_section"], HEAD_DIM / head_dim
    total = round(sum(sections) * share)
    rest = [max(1, round(n * share)) for n in sections[1:]]
    return {"rope_parameters": {**rope, "mrope_section": [total - sum(rest), *rest]}}


def small(name: str, value: int) -> int:
    """Return the small value of an integer field; never more than `value`."""
    for pattern, size in SMALL:
        if pattern.fullmatch(name):
            return min(value, size)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _declared(cls: type) -> dict[str, Any]:
    """Return the names of the fields of a config class, with their declared defaults."""
    if is_dataclass(cls):
        return {f.name: f.default for f in fields(cls)}
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _token_ids(cls: type, default: PreTrainedConfig) -> dict[str, int]:
    """Return ids within the vocabulary for image, audio and other special tokens."""
    names = [
        name
        for name in _declared(cls)
        if re.fullmatch(r"\w+_(token_id|token_index|id|idx|index)", name)
        and name not in IDS
        and _is_int(getattr(default, name, None))
        and getattr(default, name) >= VOCABULARY - 30
    ]
    return {name: VOCABULARY - 1 - i for i, name in enumerate(names)}


def _layers(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return the lists with a value for each layer, for one layer of each kind."""
    count = next((n for n in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
                  if n in values and _is_int(getattr(default, n, None))), None)  # fmt: skip
    if count is None:
        return {}
    total = getattr(default, count)
    lists = {
        name: list(value)
        for name in _declared(type(default))
        if isinstance(value := _read(default, name), (list, tuple)) and value
    }
    indices = {n: v for n, v in lists.items() if re.search("(idxs|indices|_ids|layers|indexes)$", n)
               and all(_is_int(i) and i < total for i in v) and len(set(v)) == len(v)}
    for n, v in indices.items():
        lists[n] = [i in v for i in range(total)]
    lists = {n: v for n, v in lists.items() if len(v) == total}
    chosen: list[int] = []
    for value in lists.values():
        kinds = [repr(v) for v in value]
        for kind in dict.fromkeys(kinds):
            if not any(kinds[i] == kind for i in chosen):
                chosen.append(kinds.index(kind))
    chosen += [i for i in range(total) if i not in chosen][: max(0, min(LAYERS, total) - len(chosen))]
    chosen.sort()
    found: dict[str, Any] = {n: [v[i] for i in chosen] for n, v in lists.items()}
    for n in indices:
        found[n] = [i for i, true in enumerate(found[n]) if true]
    return {count: len(chosen), **found}
