"""Families of models: bytes of a cache from the config, and a decode step of one layer.

Bytes: of the plain cache at 8k and 32k tokens, and the share of it under some recipes, as `kvloom
plan` counts them; also with packed windows, where a family has windows that recipes can pack.
Steps: a layer of the family's size, alone in a model with a small vocabulary and MLP, with
transformers' DynamicCache (sdpa, or eager where the model has no other) and with recipes,
alternately after one prompt; the median of each in processor time, and the quotient plain / recipe
in the same run.

    python benchmarks/families.py
    python benchmarks/families.py --tokens 16384 --steps 20
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import torch
import transformers as tf

import kvloom
import record
from kvloom.hf import geometry
from kvloom_lab import plan

RECIPES = ["near-lossless", "balanced", "small"]
PACKED = [f"{recipe}:sliding=packed" for recipe in RECIPES]

CONFIGS = {
    "Llama-3.1-8B": tf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072, dtype="bfloat16",
    ),
    "gpt-oss-20b": tf.GptOssConfig(num_hidden_layers=24, dtype="bfloat16"),
    "GLM-4.7-Flash": tf.Glm4MoeLiteConfig(dtype="bfloat16"),
    "DeepSeek-V3": tf.DeepseekV3Config(max_position_embeddings=163840, dtype="bfloat16"),
    "MiniCPM3-4B": tf.MiniCPM3Config(max_position_embeddings=32768, dtype="bfloat16"),
    "Gemma-3-12B": tf.Gemma3TextConfig(
        hidden_size=3840, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, sliding_window=1024, max_position_embeddings=131072, dtype="bfloat16",
    ),
    "MiMo-V2-Flash": tf.MiMoV2FlashConfig(dtype="bfloat16"),
    "Gemma-3n-E4B": tf.Gemma3nTextConfig(dtype="bfloat16"),
    "Qwen3-Next-80B": tf.Qwen3NextConfig(max_position_embeddings=262144, dtype="bfloat16"),
    "Qwen3-VL-8B": tf.Qwen3VLConfig(
        text_config={
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 262144,
        },
        dtype="bfloat16",
    ),
    "SmolLM3-3B": tf.SmolLM3Config(max_position_embeddings=65536, dtype="bfloat16"),
    "Llama-4-Scout": tf.Llama4TextConfig(max_position_embeddings=131072, dtype="bfloat16"),
}  # fmt: skip
"""One config of each family; what is not given is transformers' default for the architecture."""

_SMALL = {
    "num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "max_position_embeddings": 65536, "dtype": "float32",
}  # fmt: skip
LAYERS = {
    "gpt-oss": tf.GptOssConfig(
        hidden_size=2880, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        intermediate_size=64, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["full_attention"], **_SMALL,
    ),
    "DeepSeek, 16 heads": tf.DeepseekV3Config(
        hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512,
        q_lora_rank=768, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        intermediate_size=64, first_k_dense_replace=1, **_SMALL,
    ),
    "Gemma 3 12B, window": tf.Gemma3TextConfig(
        hidden_size=3840, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
        intermediate_size=64, sliding_window=1024, layer_types=["sliding_attention"], **_SMALL,
    ),
}  # fmt: skip


def shares(tokens: int) -> list[dict[str, Any]]:
    """The bytes of each family's plain cache, and the shares of recipes."""
    rows = []
    for name, config in CONFIGS.items():
        packed = PACKED if getattr(config, "sliding_window", None) else []
        found = plan(config, ["full", *RECIPES, *packed], context=tokens, memory=1 << 50)
        nbytes = {row.recipe: row.kv_bytes for row in found.rows if row.problem is None}
        rows.append({"family": name, "tokens": tokens, **nbytes})
        full = nbytes.pop("full")
        texts = "  ".join(f"{recipe} {x / full:.3f}" for recipe, x in nbytes.items())
        print(f"{name:<16} {full / 2**30:6.2f} GiB at {tokens:,} tokens   {texts}", flush=True)
    return rows


def steps(name: str, config: Any, tokens: int, count: int) -> list[dict[str, Any]]:
    """The median processor time of a step with the plain cache and with recipes, in ms."""
    torch.manual_seed(0)
    attention = "eager" if config.model_type == "gpt_oss" else "sdpa"
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    ids = torch.randint(3, 64, (1, tokens))
    caches: dict[str, Any] = {"plain": tf.DynamicCache(config=config)}
    recipes = PACKED if geometry(model).sliding else RECIPES
    caches |= {recipe: kvloom.Cache(model, recipe) for recipe in ("full", *recipes)}
    times: dict[str, list[float]] = {recipe: [] for recipe in caches}
    with torch.inference_mode():
        for cache in caches.values():
            if (
                isinstance(cache, kvloom.Cache)
                and cache.recipe.keep is not None
                and cache.full_layers
            ):
                model(ids, past_key_values=cache)
                continue
            for chunk in ids.split(1024, dim=1):
                model(chunk, past_key_values=cache, logits_to_keep=1)
        for step in range(count + 3):
            for recipe, cache in caches.items():
                begin = time.process_time()
                model(torch.tensor([[3 + step % 60]]), past_key_values=cache)
                if step >= 3:
                    times[recipe].append(1e3 * (time.process_time() - begin))
    medians = {recipe: statistics.median(x) for recipe, x in times.items()}
    rows = []
    for recipe, ms in medians.items():
        quotient = medians["plain"] / ms
        rows.append({"layer": name, "tokens": tokens, "recipe": recipe, "ms": ms, "x": quotient})
        print(f"{name:<20} {tokens:,} tokens  {recipe:<14} {ms:8.2f} ms  {quotient:6.2f}x")
    return rows


def main() -> None:
    options = record.options(__doc__, tokens=8192, steps=10, threads=1)
    torch.set_num_threads(options.threads)
    figures = {
        **record.environment(threads=options.threads),
        "shares": [*shares(8192), *shares(32768)],
        "steps": [
            row
            for name, config in LAYERS.items()
            for row in steps(name, config, options.tokens, options.steps)
        ],
    }
    (record.results() / "families.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
