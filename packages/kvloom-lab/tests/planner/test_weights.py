"""Weights that a plan counts: those of the model, quantized or shared."""

import pytest
import torch
import transformers as tf
import zoo
from planned_models import CONFIGS, built, facts

from kvloom.errors import UnsupportedModel
from kvloom_lab.planner import read_model
from kvloom_lab.planner.plan_recipes import plan
from kvloom_lab.planner.weights import count_weights


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_those_of_the_model(name):
    model = built(name)
    assert facts(name).weights.nbytes == sum(p.nbytes for p in model.parameters())


def test_a_tied_matrix_is_read_once_and_an_embedding_by_row(llama):
    untied = read_model(llama).weights
    llama = tf.LlamaConfig(**{**llama.to_dict(), "tie_word_embeddings": True})
    tied = read_model(llama).weights
    embedding = 2 * 128256 * 4096
    assert untied.nbytes - untied.read == embedding
    assert tied.nbytes == tied.read == untied.read
    assert tied.flops(4) == 2 * 4 * tied.parameters


@pytest.mark.parametrize("name", ["paligemma", "qwen2-vl"])
def test_encoders_of_images_are_weights_that_no_step_reads(name):
    model, weights = built(name), facts(name).weights
    assert weights.nbytes == sum(p.nbytes for p in model.parameters())
    text = sum(p.nbytes for p in model.get_decoder().parameters())
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read_twice = 0 if output is embedding else output.nbytes - embedding.nbytes
    assert weights.read == text + read_twice


def test_encoders_within_a_decoder_are_not_read():
    model = built("llama-gqa")
    encoder = tf.SiglipVisionModel(zoo.WITH_IMAGES["gemma3"]().vision_config)
    before = count_weights(model)
    model.model.encoder = encoder
    after = count_weights(model)
    assert after.read == before.read
    assert after.nbytes == before.nbytes + sum(p.nbytes for p in encoder.parameters())


def test_experts_are_read_by_some_tokens():
    config = tf.MixtralConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, vocab_size=199,
        dtype=torch.float32,
    )  # fmt: skip
    weights = read_model(config).weights
    assert weights.expert_read == 4 * 2 * 8 * 3 * 64 * 96
    two = weights.read_nbytes(1)
    assert two.low == two.high == pytest.approx(weights.read + weights.expert_read / 4)
    four = weights.read_nbytes(4)
    assert four.low == two.low < four.best < four.high == weights.read + weights.expert_read


LINEAR = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64),
          "gate": (96, 64), "up": (96, 64), "down": (64, 96)}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda o, i: o * i + 4 * o),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            lambda o, i: o * i // 2 + o * i // 64 * 4 + 64,
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            lambda o, i: o * i // 2 + i // 32 * (o // 2 + 2 * o) + 4 * i,
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
            lambda o, i: o * i // 2 + i // 32 * (o // 2 + 2 * o),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            lambda o, i: o * i + 4 * (o // 32) * (i // 32),
        ),
    ],
)
def test_quantized_weights_are_counted_by_their_layout(settings, nbytes):
    plain = facts("llama-gqa")
    found = facts("llama-gqa", quantization_config=settings)
    saved = sum(4 * o * i - nbytes(o, i) for o, i in LINEAR.values())
    assert plain.weights.nbytes - found.weights.nbytes == 3 * saved
    skipping = {**settings, "modules_to_not_convert": ["lm_head", "q_proj"]}
    fewer = facts("llama-gqa", quantization_config=skipping)
    o, i = LINEAR["q"]
    assert fewer.weights.nbytes - found.weights.nbytes == 3 * (4 * o * i - nbytes(o, i))


def test_fp8_is_what_transformers_makes_of_it():
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    config = CONFIGS["llama-gqa"]()
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    settings = tf.FineGrainedFP8Config(weight_block_size=(32, 32))
    replace_with_fp8_linear(model, ["lm_head"], settings)
    found = facts("llama-gqa", quantization_config=settings.to_dict())
    assert found.weights.nbytes == sum(p.nbytes for p in model.parameters())


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.mark.parametrize(
    ("layers", "experts", "gib"), [(24, 32, 12.8), (36, 128, 60.8)], ids=["20b", "120b"]
)
def test_mxfp4_has_the_bytes_of_gpt_oss(layers, experts, gib):
    """The sizes of the checkpoints are those of the model card (arXiv:2508.10925, Table 1)."""
    config = tf.GptOssConfig(
        num_hidden_layers=layers, num_local_experts=experts, dtype=torch.bfloat16,
        quantization_config=MXFP4,
    )  # fmt: skip
    with torch.device("meta"):
        weights = count_weights(tf.AutoModelForCausalLM.from_config(config))
    assert round(weights.nbytes / 2**30, 1) == gib
    assert weights.read_nbytes(1).best == pytest.approx(
        weights.read + weights.expert_read * 4 / experts
    )


# bad input


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (lambda: tf.T5Config(), "encoder-decoder"),
        (lambda: tf.DeepseekV32Config(num_hidden_layers=2), "cannot count what layers"),
        (lambda: tf.MambaConfig(num_hidden_layers=2), "no attention"),
        (
            lambda: tf.LlamaConfig(quantization_config={"quant_method": "hqq"}),
            "quantized by hqq are not counted",
        ),
        (
            lambda: tf.LlamaConfig(quantization_config=MXFP4),
            "which weights of a llama mxfp4 quantizes is not known",
        ),
        (
            lambda: tf.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 3}),
            "GPTQ with bits=3",
        ),
        (
            lambda: tf.LlamaConfig(quantization_config={"quant_method": "fp8"}),
            "fp8 without weight_block_size",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(config, says):
    with pytest.raises(UnsupportedModel, match=says):
        read_model(config())


def test_states_that_cannot_be_counted_are_refused_by_name(monkeypatch):
    monkeypatch.setattr("kvloom_lab.planner.model.state_nbytes", lambda model: None)
    with pytest.raises(UnsupportedModel, match=r"what layers \[0, 2\] store \(LinearAttention"):
        read_model(CONFIGS["lfm2"]())


def test_a_config_without_a_dtype_is_warned_of():
    config = CONFIGS["llama-gqa"]()
    config.dtype = None
    assert "states no dtype" in plan(config, ["full"], context=64).warnings[0]
