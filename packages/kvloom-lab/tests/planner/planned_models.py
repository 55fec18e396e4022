"""Small models of several architectures, and what the planner reads of them."""

import torch
import transformers as tf
import zoo

from kvloom_lab.models import model_class
from kvloom_lab.planner import read_model

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "vocab_size": 199, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip
_GQA = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16}
_OLD = {"hidden_size": 64, "vocab_size": 199, "pad_token_id": 0}
CONFIGS = {
    "llama-gqa": lambda: tf.LlamaConfig(**_GQA),
    "llama-mqa": lambda: tf.LlamaConfig(**{**_GQA, "num_key_value_heads": 1}),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_GQA, sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    ),
    "mistral-sliding": lambda: tf.MistralConfig(**_GQA, sliding_window=24),
    "jamba": lambda: tf.JambaConfig(
        **{**_GQA, "num_hidden_layers": 4}, mamba_dt_rank=4, num_experts=2, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False,
    ),
    "falcon-h1": lambda: tf.FalconH1Config(
        **_GQA, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **{k: v for k, v in _GQA.items() if k != "head_dim"},
        layer_types=["conv", "full_attention", "conv"],
    ),
    "falcon-mqa": lambda: tf.FalconConfig(
        **_OLD, num_hidden_layers=3, num_attention_heads=4, multi_query=True
    ),
    "opt": lambda: tf.OPTConfig(
        **_OLD, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64,
        max_position_embeddings=1024,
    ),
    "bloom": lambda: tf.BloomConfig(**_OLD, n_layer=3, n_head=4),
}  # fmt: skip

_ZOO = zoo.CONFIGS | zoo.HYBRIDS | zoo.WITHOUT_ROPE | zoo.WITH_IMAGES
_OF_ZOO = (
    "gpt-oss", "gemma4-shared", "deepseek-v3", "qwen3-next", "smollm3", "llama4", "paligemma",
    "qwen2-vl",
)  # fmt: skip
FAMILIES = CONFIGS | {name: _ZOO[name] for name in _OF_ZOO} | {
    "mllama": lambda: tf.MllamaConfig(
        text_config={
            **_GQA, "model_type": "mllama_text_model", "cross_attention_layers": [1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "image_size": 32,
            "attention_heads": 2, "patch_size": 16, "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
    ),
    "mimo": lambda: tf.MiMoV2FlashConfig(
        **{**_GQA, "num_key_value_heads": 1}, v_head_dim=32, sliding_window=24,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "kimi-linear": lambda: tf.KimiLinearConfig(
        **_SIZES, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
        v_head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        linear_head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
}  # fmt: skip
"""Also of attention sinks, shared and unequal layers, latents, states, layers without rotary
embedding, and images."""


def built(name: str):
    """A small model with random weights."""
    config = FAMILIES[name]()
    return model_class(config).from_config(config, dtype=torch.float32).eval()


def facts(name: str, **changes):
    """What the planner reads of its config."""
    config = FAMILIES[name]()
    config.dtype = torch.float32
    for key, value in changes.items():
        setattr(config, key, value)
    return read_model(config)
