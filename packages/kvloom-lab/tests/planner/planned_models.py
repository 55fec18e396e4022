"""Small models of several architectures, and what the planner reads of them."""

import torch
import transformers as tf

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


def built(name: str):
    """A small model with random weights."""
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()


def facts(name: str, **changes):
    """What the planner reads of its config."""
    config = CONFIGS[name]()
    config.dtype = torch.float32
    for key, value in changes.items():
        setattr(config, key, value)
    return read_model(config)
