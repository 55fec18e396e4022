"""What the small configs need besides small numbers.

`CHANGES` has fields by model type. They also apply where the config is a part of another.
"""

from __future__ import annotations

from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Three axes of positions, for a head of 16 dimensions.
MROPE = {**ROPE, "mrope_section": [4, 2, 2]}
GEMMA4_TEXT = {
    "layer_types": [SLIDING, SLIDING, FULL], "global_head_dim": 32,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199,
}  # fmt: skip

CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "blenderbot": {"encoder_layers": 3},
    "bailing_hybrid": {"layer_types": [LINEAR, FULL, LINEAR], "num_key_value_heads": 4},
    "cohere_compass_text": {
        "layer_types": [SLIDING, SLIDING, FULL],
        "rope_parameters": {SLIDING: MROPE, FULL: MROPE},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_ocr2_text": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                           "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "dots1": {
        "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "layer_types": [FULL, SLIDING, FULL], "first_k_dense_replace": 1,
    },
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense", "dense", "sparse"],
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "falcon_h1": {"mamba_n_heads": 4},
    "gemma3n_text": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": 96, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    },
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_unified_text": GEMMA4_TEXT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2,
                "num_layers": 4},
    "granitemoehybrid": {
        "mamba_n_heads": 8, "layer_types": [LINEAR, FULL, LINEAR],
        "position_embedding_type": "rope", "num_key_value_heads": 2,
    },
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1], "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron_h": {"layers_block_type": [LINEAR, "moe", FULL, "mlp"], "mamba_num_heads": 8,
                   "n_groups": 2},
    "reformer": {
        "attn_layers": ["local", "lsh", "local"], "axial_pos_shape": [32, 32],
        "axial_pos_embds_dim": [32, 32], "num_buckets": 4, "lsh_attn_chunk_length": 16,
        "local_attn_chunk_length": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid", LINEAR],
              "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4},
}  # fmt: skip
