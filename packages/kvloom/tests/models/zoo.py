"""Tiny random models of every supported architecture, built from configs."""

from __future__ import annotations

import torch
import transformers as tf
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.roformer import modeling_roformer

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 199,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_OLD = {
    name: _COMMON[name] for name in _COMMON if name.endswith("_token_id") or name == "vocab_size"
}
_FALCON = {**_OLD, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}

CONFIGS = {
    "llama-gqa": lambda: tf.LlamaConfig(**_GQA),
    "llama-mha": lambda: tf.LlamaConfig(**{**_GQA, "num_key_value_heads": 4}),
    "llama-mqa": lambda: tf.LlamaConfig(**{**_GQA, "num_key_value_heads": 1}),
    "mistral": lambda: tf.MistralConfig(**_GQA, sliding_window=None),
    "mistral-sliding": lambda: tf.MistralConfig(**_GQA, sliding_window=24),
    "qwen2": lambda: tf.Qwen2Config(**{k: v for k, v in _GQA.items() if k != "head_dim"}),
    "qwen3": lambda: tf.Qwen3Config(**_GQA),
    "phi3": lambda: tf.Phi3Config(**{k: v for k, v in _GQA.items() if k != "head_dim"}),
    "gemma2": lambda: tf.Gemma2Config(
        **_GQA, sliding_window=24, query_pre_attn_scalar=16, attn_logit_softcapping=20.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_GQA,
        sliding_window=24,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gpt-oss": lambda: tf.GptOssConfig(
        **_GQA, sliding_window=24, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "gemma4-shared": lambda: tf.Gemma4TextConfig(
        **{**_GQA, "num_hidden_layers": 5}, global_head_dim=32, sliding_window=24,
        num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=199,
        layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    ),
    "glm4": lambda: tf.Glm4Config(**_GQA, partial_rotary_factor=0.5),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=199, n_positions=1024,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "opt": lambda: tf.OPTConfig(
        hidden_size=64, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=199,
        max_position_embeddings=1024, word_embed_proj_dim=64, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**_COMMON, rotary_pct=0.25),
    "stablelm": lambda: tf.StableLmConfig(
        **{k: v for k, v in _GQA.items() if k != "head_dim"}, partial_rotary_factor=0.25
    ),
    "gptj": lambda: tf.GPTJConfig(
        **_OLD, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, n_positions=1024
    ),
    "mpt": lambda: tf.MptConfig(**_OLD, d_model=96, n_layers=3, n_heads=6, max_seq_len=1024),
    "falcon-mqa": lambda: tf.FalconConfig(**_FALCON, multi_query=True, bias=True),
    "falcon-gqa": lambda: tf.FalconConfig(
        **_FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon-alibi": lambda: tf.FalconConfig(
        # 9 heads: one slope is no power of two, and far biases are rounded unevenly
        **{**_FALCON, "num_attention_heads": 9, "hidden_size": 144},
        alibi=True, multi_query=False, parallel_attn=False,
    ),
    "bloom": lambda: tf.BloomConfig(**_OLD, hidden_size=96, n_layer=3, n_head=6),
    "codegen": lambda: tf.CodeGenConfig(
        **_OLD, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, n_positions=1024, n_ctx=1024
    ),
    "gpt-neo": lambda: tf.GPTNeoConfig(
        **_OLD, hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, window_size=24,
        max_position_embeddings=1024, attention_types=[[["global", "local", "global"], 1]],
    ),
    "gpt-neox-japanese": lambda: tf.GPTNeoXJapaneseConfig(
        **{k: v for k, v in _COMMON.items() if k != "intermediate_size"},
        intermediate_multiple_size=2,
    ),
    "jetmoe": lambda: tf.JetMoeConfig(
        **_OLD, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_key_value_heads=2,
        kv_channels=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=1024,
    ),
    "diffllama": lambda: tf.DiffLlamaConfig(
        **{**_COMMON, "num_attention_heads": 8}, num_key_value_heads=4
    ),
    "roformer": lambda: tf.RoFormerConfig(**_COMMON, is_decoder=True),
    "xglm": lambda: tf.XGLMConfig(
        **_OLD, d_model=64, ffn_dim=96, num_layers=3, attention_heads=4,
        max_position_embeddings=1024,
    ),
}  # fmt: skip

RECORDS = hasattr(tf.cache_utils.DynamicSlidingWindowLayer, "activate_past_recording")
"""Else transformers is old, and takes no draft back out of a sliding window."""

if not hasattr(modeling_roformer, "create_causal_mask"):
    del CONFIGS["roformer"]  # transformers 5.10: a token of a prompt sees later ones

if hasattr(DeepseekV3Attention, "expand_kv"):  # older transformers cache what it returns
    CONFIGS["deepseek-v3"] = lambda: tf.DeepseekV3Config(
        **_COMMON, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=24, first_k_dense_replace=2, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip

_MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
HYBRIDS = {
    "qwen3-next": lambda: tf.Qwen3NextConfig(
        **_GQA, **_MOE, shared_expert_intermediate_size=32, linear_num_value_heads=4,
        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    ),
    "jamba": lambda: tf.JambaConfig(
        **{**_GQA, "num_hidden_layers": 4}, mamba_d_state=16, mamba_dt_rank=4,
        use_mamba_kernels=False, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
    ),
    "falcon-h1": lambda: tf.FalconH1Config(
        **_GQA, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16,
        mamba_chunk_size=8,
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **_COMMON, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"]
    ),
    "minimax": lambda: tf.MiniMaxConfig(
        **_GQA, num_local_experts=4, num_experts_per_tok=2, block_size=16,
        layer_types=["full_attention", "linear_attention", "full_attention"],
    ),
}  # fmt: skip
"""Models of which some layers carry states: linear attention with experts, Mamba without RoPE, a
state beside attention in each layer, convolutions alone, and a model with a cache of its own."""

WITHOUT_ROPE = {
    "smollm3": lambda: tf.SmolLM3Config(**_GQA, no_rope_layers=[1, 0, 1]),
    "cohere2": lambda: tf.Cohere2Config(
        **_GQA, sliding_window=24, layer_types=["sliding_attention"] * 2 + ["full_attention"]
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **_GQA, intermediate_size_mlp=96, num_local_experts=2, attention_chunk_size=24,
        no_rope_layers=[1, 1, 0], layer_types=["chunked_attention"] * 2 + ["full_attention"],
    ),
}  # fmt: skip
"""Models that rotate no keys in some or all layers of full attention."""

# With and without RoPE, sliding layers, grouped heads, attention sinks, shared and unequal layers,
# latents and an adapter.
OF_EACH_KIND = [
    "llama-gqa", "gemma2", "gpt-oss", "gemma4-shared", "gpt2", "gptj", "falcon-gqa", "bloom",
    *({"deepseek-v3"} & {*CONFIGS}),
]  # fmt: skip

# Their positions are learned, or added to embeddings.
LEARNED = ("gpt2", "opt", "gpt-neo", "xglm")

# Their attention modules get another forward.
ADAPTED = (
    "gptj", "mpt", "falcon-mqa", "falcon-gqa", "falcon-alibi", "bloom", "codegen", "gpt-neo",
    "gpt-neox-japanese", "jetmoe", "diffllama", "xglm",
    *(name for name in CONFIGS if name == "roformer"),
)  # fmt: skip


_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 16,
}  # fmt: skip
IMAGE_TOKEN, IMAGE_TOKENS = 190, 4
WITH_IMAGES = {
    "gemma3": lambda: tf.Gemma3Config(
        text_config=CONFIGS["gemma3"](), vision_config=_VISION,
        mm_tokens_per_image=IMAGE_TOKENS, image_token_id=IMAGE_TOKEN,
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config={**_GQA, "model_type": "gemma"}, projection_dim=64,
        vision_config={**_VISION, "projection_dim": 64},
        image_token_id=IMAGE_TOKEN,
    ),
    "llava": lambda: tf.LlavaConfig(
        text_config=CONFIGS["llama-gqa"](), image_token_id=IMAGE_TOKEN,
        vision_config={**_VISION, "model_type": "clip_vision_model"},
    ),
    "qwen2-vl": lambda: tf.Qwen2VLConfig(
        text_config={
            **_COMMON, "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]
            },
        },
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 16,
            "mlp_ratio": 1,
        },
        image_token_id=IMAGE_TOKEN, vision_start_token_id=191, vision_end_token_id=192,
        video_token_id=193,
    ),
    "qwen3-vl": lambda: tf.Qwen3VLConfig(
        text_config={
            **_GQA,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "patch_size": 16,
            "intermediate_size": 48, "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
        },
        image_token_id=IMAGE_TOKEN, vision_start_token_id=191, vision_end_token_id=192,
        video_token_id=193,
    ),
}  # fmt: skip
"""Models that read images: whose tokens see each other, after a bidirectional prefix, causal,
causal with positions on three axes, and with images that layers read, too."""


def build_with_images(name: str) -> tf.PreTrainedModel:
    """A model of `WITH_IMAGES` in eval mode, fp32."""
    torch.manual_seed(0)
    model = tf.AutoModelForImageTextToText.from_config(WITH_IMAGES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4) if parameter.any() else parameter.normal_(std=0.1)
    return model


def image_prompt(model: tf.PreTrainedModel, before: int, after: int, seed: int = 0) -> dict:
    """A row of text, an image and text, as the model's processor would give it."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, IMAGE_TOKEN, (1, before + after), generator=generator)
    image = torch.full((1, IMAGE_TOKENS), IMAGE_TOKEN)
    ids = torch.cat([text[:, :before], image, text[:, before:]], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["pixel_values"] = torch.randn(1, 3, 32, 32, generator=generator)
    if model.config.model_type in ("qwen2_vl", "qwen3_vl"):
        inputs["pixel_values"] = torch.randn(16, 2 * 3 * 16 * 16, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        inputs["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if model.config.model_type == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    elif model.config.model_type == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    return inputs


def build(name: str, seed: int = 0, **changes) -> tf.PreTrainedModel:
    """A model in eval mode, fp32, with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    config = (CONFIGS | HYBRIDS | WITHOUT_ROPE)[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    # eager is plain for every model: sdpa drops Gemma 2's softcap in some versions
    eager = (
        "gemma2", "gpt-oss", "gptj", "mpt", "bloom", "codegen", "gpt-neo", "gpt-neox-japanese",
        "roformer", "xglm",
    )  # fmt: skip
    attention = "eager" if name in eager else "sdpa"
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 2 and name != "gemma4-shared":  # which normalizes its logits
                parameter.mul_(4)
            elif path.endswith("sinks"):
                parameter.normal_()
    model.generation_config.eos_token_id = None  # random models: never stop early
    return model


def batch(rows: int = 3, tokens: int = 61, padding: tuple[int, ...] = (0, 17, 40)) -> dict:
    """Prompts [rows, tokens] of random tokens, left-padded."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 199, (rows, tokens), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(padding[:rows]):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}
