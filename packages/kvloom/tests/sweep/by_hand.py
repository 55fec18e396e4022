"""Fields of small configs that `shrink` cannot give by their names, by model type.

`CHANGES` makes a small model valid, or gives it layers that its default lacks. It also applies to a
part of another config. `FORMS` has other forms of a model whose attention or cache differs.
`DEFAULTS` has arguments of a config whose default is not valid.
"""

from __future__ import annotations

from typing import Any

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [4, 2, 2]}  # three axes of positions in a head of 16 dimensions
HALF_MROPE = {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
DEEPSEEK = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
GEMMA4 = {
    "layer_types": [SLIDING, SLIDING, FULL], "global_head_dim": 32,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199,
}  # fmt: skip
GEMMA4_FORMS = {
    "shared layers": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "values are keys": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "experts": {
        "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip
ASSISTANT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
          "num_attention_heads": 4, "image_size": 32, "patch_size": 16}  # fmt: skip
MUSIC = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]]}

# Models whose default attention is wrong: sdpa drops the softcap in transformers 5.10.
EAGER = ("gemma2",)

# Why models cannot be built here, and why transformers' own generate fails.
NOT_BUILT = {
    "gemma3n": "its image part needs the package timm; its text part is `gemma3n_text`",
    "gemma4_assistant": "a draft model, which reads the cache of another model",
    "gemma4_unified_assistant": "a draft model, which reads the cache of another model",
    "perception_lm": "its image part needs the package timm",
    "pi0": "it generates the actions of a robot, and no text",
}
PLAIN_FAILS = {
    "blt": "transformers makes its cache from a field that its config lacks",
    "diffusion_gemma": "it generates blocks of tokens by diffusion, without logits of each",
    "musicgen": "its generate fails without the model of music around it",
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **ASSISTANT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text"}},
    "musicgen": {**MUSIC, "decoder": {"model_type": "musicgen_decoder"}},
    "musicgen_melody": {**MUSIC, "decoder": {"model_type": "musicgen_melody_decoder"}},
    "vision-encoder-decoder": {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "bert"}},
}

CHANGES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": [LINEAR, FULL, LINEAR]},
    "bamba": {"mamba_n_heads": 8, "attn_layer_indices": [1]},
    "blenderbot": {"encoder_layers": 3, "num_hidden_layers": 3},
    "blip-2": {"image_token_index": 198, "num_query_tokens": 4},
    "blt": {"encoder_hash_byte_group_vocab": 199},
    "chameleon": {"vocabulary_map": {"<image>": 198, "IMGIMGAZ": 190, "IMGIMGBZ": 191},
                  "vq_config": {"num_embeddings": 2}},
    "cohere_compass_text": {
        "layer_types": [SLIDING, SLIDING, FULL], "rope_parameters": {SLIDING: MROPE, FULL: MROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64},
    },
    "deepseek_ocr2_text": {**DEEPSEEK, **SPARSE},
    "deepseek_v2": DEEPSEEK,
    "diffusion_gemma_text": {
        "layer_types": [SLIDING, SLIDING, FULL], "global_head_dim": 32, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 32,
    },
    "doge": {"keep_window_size": 16},
    "dots1": {
        **DEEPSEEK, "n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1,
        "layer_types": [FULL, SLIDING, FULL],
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64},
    "dots3_note_vision_encoder": {
        "adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense"] * 3,
        "num_experts_per_tok": 2,
    },
    "emu3": {"vocabulary_map": {
        "<image>": 198, "<|extra_200|>": 197, "<|visual token 000000|>": 190,
        "<|visual token 000001|>": 191,
    }},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**ROPE, "mrope_section": [3, 3, 2]},
                             "moe_intermediate_size": [32, 32]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16},
    "fast_vlm": {"vision_config": {"model_type": "clip_vision_model", **VISION}},  # without timm
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
        "intermediate_size": 96, "hidden_size_per_layer_input": 8, "laurel_rank": 8,
    },
    "gemma4": {
        "text_config": {"use_bidirectional_attention": "vision"},
        "vision_config": {"model_type": "gemma4_vision", **VISION, "num_key_value_heads": 4,
                          "head_dim": 16, "position_embedding_size": 64},
    },
    "gemma4_assistant": {"text_config": {**ASSISTANT, "num_kv_shared_layers": 3}},
    "gemma4_text": GEMMA4,
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 3}},
    "gemma4_unified_text": GEMMA4,
    "glm46v_text": {"rope_parameters": MROPE},
    "glm4v_moe_text": {"rope_parameters": HALF_MROPE},
    "glm4v_text": {"rope_parameters": MROPE},
    "glm5_next_text": {"index_kpool": 4},
    "glm_ocr_text": {"rope_parameters": MROPE},
    "glmga_text": {"rope_parameters": MROPE},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 2]], "num_layers": 4,
        "window_size": 16, "attention_layers": ["global", "local"] * 2,
    },
    "granite4_vision": {
        **PINPOINTS, "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [0, 1],
        "downsample_rate": "1/2", "text_config": {
            "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    },
    "granitemoehybrid": {
        "mamba_n_heads": 8, "layer_types": ["mamba", "attention", "mamba"],
        "position_embedding_type": "rope", "num_key_value_heads": 2,
    },
    "hunyuan_vl_text": {"rope_parameters": MROPE},
    "inkling_vision": {"num_hidden_layers": 8},
    "instructblip": {"image_token_index": 198, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 198, "num_query_tokens": 4},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kosmos-2": {"latent_query_num": 4},
    "lfm2": {
        "layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {"layer_types": ["conv", FULL, "conv"], "num_hidden_layers": 3},
    "llama4_vision_model": {"intermediate_size": 256},
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minimax_m3_vl_text": {
        **SPARSE, "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_block_size": 8, "index_topk_blocks": 2,
    },
    "mistral_large4_text": {
        "num_hidden_layers": 4, "kv_source_layers": [0, 1, 0, 1], "no_rope_layers": [1, 0, 1, 0],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["indexed_attention"] * 4,
        "indexer_types": ["full", "full", "shared", "shared"],
    },
    "mllama_vision_model": {"vision_output_dim": 128},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 8,
        "n_groups": 2,
    },
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "paddleocr_vl_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_text": {"rope_parameters": MROPE},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 190},
    "qwen2_5_vl_text": {"rope_parameters": MROPE},
    "qwen2_vl_text": {"rope_parameters": MROPE},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 190},
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "hash_seed": 1, "attn_layers": ["local", "lsh", "local"], "axial_pos_shape": [32, 32],
        "axial_pos_embds_dim": [32, 32], "num_buckets": 4, "lsh_attn_chunk_length": 16,
        "local_attn_chunk_length": 16,
    },
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p5": {
        **SPARSE, "sliding_window": 16, "layer_types": [FULL, SLIDING, FULL],
        "num_sliding_attention_heads": 2,
    },
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "vipllava": {"vision_feature_layers": [-1, -2, 0]},
    "vision-encoder-decoder": {"decoder": {"add_cross_attention": True}},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 6, "num_key_value_heads": 4, "attention_hidden_size": 128,
        "attention_head_dim": 32, "attn_layer_period": 2, "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
    },
}  # fmt: skip

FORMS: dict[str, dict[str, dict[str, Any]]] = {
    "falcon": {
        "ALiBi": {"alibi": True, "multi_query": False, "parallel_attn": False},
        "grouped heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
    },
    "gemma2": {"softcap": {"attn_logit_softcapping": 2.0}},
    "gemma4_text": GEMMA4_FORMS,
    "gemma4_unified_text": GEMMA4_FORMS,
    "gpt2": {"scaled by layer": {"scale_attn_by_inverse_layer_idx": True}},
    "gpt_bigcode": {"multi-head": {"multi_query": False}},
    "mpt": {"no ALiBi": {"attn_config": {"alibi": False}}},
}  # fmt: skip
