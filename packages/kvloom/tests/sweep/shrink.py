"""Small configs of any model of transformers, by the names of their fields.

A config keeps a layer of each kind that its default has. `by_hand` has what names cannot give.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

from by_hand import CHANGES, DEFAULTS, FORMS, FULL, SLIDING
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.cache_utils import DynamicCache

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, WINDOW, LAYERS = 4, 2, 16, 199, 16, 3
COUNTS = "num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth"

# The first pattern that matches the whole name of an integer field gives its largest value.
SMALL = [
    (re.compile(pattern), value)
    for pattern, value in (
        # tokens and positions
        (r"\w*vocab_size(_per_layer_input)?|n_vocab", VOCABULARY),
        (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(target|source)_positions|"
         r"model_max_length|context_length|original_max_position_embeddings", 1024),
        (r"sliding_window(_size)?|attention_window_size|attention_chunk_size|local_attention|"
         r"local_attention_window_len", WINDOW),
        # experts
        (r"n_routed_experts|(moe_)?num_(local_)?experts|zero_expert_num", 4),
        (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts", 2),
        (r"n_shared_experts|(moe_)?num_shared_experts|n_group|num_expert_group|topk_group", 1),
        (r"\w*(moe|expert|shared)\w*_(intermediate|ffn_hidden)_size|share_expert_dim", 32),
        # attention
        (r"(swa_)?num_(key_value|kv)_heads|kv_n_heads", KV_HEADS),
        (r"(index|indexer)_n_heads|o_groups", 2),
        (r"\w*(num|n)_(\w+_)?heads?|\w*attention_heads|num_query_groups", HEADS),
        (r"qk_rope_head_dim|rotary_dim|index_topk", 8),
        (r"qk_head_dim", 24),
        (r"\w*head_dim|d_kv|d_head|kv_channels|dim_head|attention_head_size|\w*headdim|"
         r"mamba_d_head", HEAD_DIM),
        (r"(q|kv|o)_lora_rank", 32),
        # states
        (r"mamba_d_state|state_size|ssm_state_size", 16),
        (r"\w*chunk_size", 8),
        (r"mamba_dt_rank|time_step_rank", 4),
        # layers
        (r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|"
         r"layers|num_blocks|depth", LAYERS),
        (r"num_layers_per_stack", 2),
        (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
        # widths
        (r"\w*(intermediate|ffn_hidden|inner|feed_forward)_size(_mlp)?|\w*ffn_dim|d_ff|dff|dim_ff|"
         r"n_inner|mlp_dim|d_inner", 96),
        (r"\w*(hidden|embedding)_size\w*|\w*emb(ed|edding)?_dim|d_model|n_embd|lru_width|"
         r"word_embed_proj_dim|\w*projection_dim|projector_(in|out)put_dim|(vision_)?output_dim|"
         r"adapter_out_dim|pooler_output_size|mamba_d_ssm", 64),
        # images
        (r"image_size|img_size", 32),
        (r"patch_size", 16),
    )
]  # fmt: skip
WINDOWS = "window", "no window"  # forms that `forms` finds itself
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
CAUSAL = {"is_decoder": True, "use_cache": True, "add_cross_attention": False}
INDICES = re.compile(r"\w*(idxs|indices|indexes|_ids|layers)")


def config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the small config of a model type; `changes` replace fields."""
    return shrink(_default(CONFIG_MAPPING[model_type]), changes)


def forms(base: PreTrainedConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, changes) of other forms of a text model, with other kinds of layers."""
    yield from FORMS.get(base.model_type, {}).items()
    declared, kinds = _declared(type(base)), layer_kinds(base)
    if "sliding_window" not in declared:
        return
    if SLIDING not in kinds:
        name, changes = "window", {
            "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
            "layer_types": [SLIDING, FULL, SLIDING],
        }  # fmt: skip
    elif set(kinds) == {SLIDING}:
        name, changes = "no window", {"sliding_window": None, "layer_types": [FULL] * len(kinds)}
    else:
        return
    changes = {field: value for field, value in changes.items() if field in declared}
    try:
        other = config(base.model_type, **changes)
    except StrictDataclassError:  # the model does not have these layers
        return
    if layer_kinds(other) != kinds:
        yield name, changes


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """Return the kind of each layer, as transformers names it or as its cache has it."""
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        return list(kinds)
    kind = SLIDING if getattr(text, "sliding_window", None) else FULL
    count = getattr(text, "num_hidden_layers", None)
    if kind == SLIDING:  # some models have the field and do not use it
        layers = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
        return [SLIDING if "Sliding" in name else FULL for name in layers] or [FULL] * count
    return [kind] * (count or 0)


def shrink(default: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """Return a small config of the class of `default`, with shrunk parts."""
    cls = type(default)
    changes = {**CHANGES.get(cls.model_type, {}), **changes}
    values: dict[str, Any] = {}
    plain = _default(cls)
    for name, declared in _declared(cls).items():
        value = _read(default, name)
        if isinstance(value, PreTrainedConfig):
            values[name] = _part(value, changes.pop(name, {}))
        elif name in CAUSAL and value is not None:
            values[name] = CAUSAL[name]
        elif name in IDS:
            values[name] = IDS[name]
        elif _is_int(value) and (declared is not None or value != _read(plain, name)):
            values[name] = _small(name, value)
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig) and name not in values and name[0] != "_":
            values[name] = _part(value, changes.pop(name, {})).to_dict()  # given as an argument
    values |= _token_ids(default) | _layers(default, values)
    values |= _heads(default, values) | _rope(default)
    return cls(**{**values, **changes})


def _default(cls: type[PreTrainedConfig]) -> PreTrainedConfig:
    return cls(**deepcopy(DEFAULTS.get(cls.model_type, {})))


def _part(default: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """Return the small config of a part; `changes` may replace it by another model type."""
    if changes.get("model_type", default.model_type) != default.model_type:
        return CONFIG_MAPPING[changes["model_type"]](**changes)
    return shrink(default, changes)


def _small(name: str, value: int) -> int:
    for pattern, size in SMALL:
        if pattern.fullmatch(name):
            return min(value, size)
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _declared(cls: type) -> dict[str, Any]:
    """Return the names of the fields of a config class, with their declared defaults."""
    if is_dataclass(cls):
        return {field.name: field.default for field in fields(cls)}
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}


def _read(config: PreTrainedConfig, name: str) -> Any:
    """Return a field, or its declared default where it differs between layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return _declared(type(config))[name]


def _token_ids(default: PreTrainedConfig) -> dict[str, int]:
    """Return ids within the vocabulary for image, audio and other special tokens."""
    names = [
        name
        for name in _declared(type(default))
        if re.fullmatch(r"\w+_(id|idx|index)", name)
        and name not in IDS
        and _is_int(value := _read(default, name))
        and value >= VOCABULARY - 30
    ]
    return {name: VOCABULARY - 1 - i for i, name in enumerate(names)}


def _heads(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, int]:
    """Return the key/value heads: as many as heads where the default has as many, or no number."""
    declared, found = _declared(type(default)), {}
    for prefix in ("", "swa_"):
        heads, kv_heads = prefix + "num_attention_heads", prefix + "num_key_value_heads"
        if kv_heads in declared and _read(default, kv_heads) is None:
            found[kv_heads] = KV_HEADS
        elif kv_heads in values and _read(default, heads) == _read(default, kv_heads):
            found[kv_heads] = values[heads]
    if "head_dim" in declared and _read(default, "head_dim") is None:
        found["head_dim"] = HEAD_DIM
    return found


def _rope(default: PreTrainedConfig) -> dict[str, Any]:
    """Return rotary parameters with the axes of positions that fit the small heads."""
    rope = _read(default, "rope_parameters")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    head_dim = _read(default, "head_dim") or default.hidden_size // default.num_attention_heads
    share = HEAD_DIM / head_dim
    rest = [max(1, round(n * share)) for n in rope["mrope_section"][1:]]
    first = round(sum(rope["mrope_section"]) * share) - sum(rest)
    return {"rope_parameters": {**rope, "mrope_section": [first, *rest]}}


def _layers(default: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return the number of layers, and the lists with a value for each, for one of each kind."""
    count = next((n for n in COUNTS if n in values and _is_int(_read(default, n))), None)
    if count is None:
        return {}
    total = getattr(default, count)
    lists = {
        name: list(value)
        for name in _declared(type(default))
        if isinstance(value := _read(default, name), list | tuple)
    }
    indices = {
        name
        for name, value in lists.items()
        if INDICES.fullmatch(name)
        and value
        and all(_is_int(i) and i < total for i in value)
        and len(set(value)) == len(value)
    }
    for name in indices:
        lists[name] = [i in lists[name] for i in range(total)]
    lists = {name: value for name, value in lists.items() if len(value) == total}
    chosen: list[int] = []
    for value in lists.values():
        kinds = [repr(item) for item in value]
        missing = [k for k in dict.fromkeys(kinds) if all(kinds[i] != k for i in chosen)]
        chosen += [kinds.index(kind) for kind in missing]
    others = [i for i in range(total) if i not in chosen]
    chosen = sorted(chosen + others[: max(0, LAYERS - len(chosen))])
    found = {name: [value[i] for i in chosen] for name, value in lists.items()}
    for name in indices:
        found[name] = [i for i, present in enumerate(found[name]) if present]
    return {count: len(chosen), **found}
