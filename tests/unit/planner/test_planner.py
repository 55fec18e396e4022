"""Plans: bytes equal those of real caches, inverse questions agree, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf

import kvloom
import probe
from for_each import for_each
from kvloom.errors import InputError, UnsupportedModel
from kvloom.planner import hardware_file, plan_recipes, read_model
from kvloom.planner.cache_bytes import CacheBytes
from kvloom.planner.decode_step import step_work
from kvloom.planner.hardware import Hardware
from kvloom.planner.largest import UNLIMITED, largest
from kvloom.planner.plan_recipes import plan
from kvloom.planner.presets import PRESETS
from kvloom.planner.ranges import Range
from kvloom.planner.units import parse_bytes, parse_rate, parse_tokens
from kvloom.recipe.resolve import RECIPES, resolve

TOKENS = 300
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
    "falcon-mqa": lambda: tf.FalconConfig(
        **_OLD, num_hidden_layers=3, num_attention_heads=4, multi_query=True
    ),
    "opt": lambda: tf.OPTConfig(
        **_OLD, ffn_dim=96, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64,
        max_position_embeddings=1024,
    ),
    "bloom": lambda: tf.BloomConfig(**_OLD, n_layer=3, n_head=4),
}  # fmt: skip
RECIPE_SPECS = (
    "full", "kivi:group=16", "h2o", "snapkv:tokens=100", "pyramidkv:tokens=100,window=8",
    "quest:page=4,tokens=64,recent=8,full_layers=1", "streaming:tokens=50",
    "kivi:group=16@first 1=full@last 1=kivi:bits=4,group=16",
)  # fmt: skip


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


@pytest.fixture(scope="module")
def llama():
    """The config of Llama-3.1-8B's shape, with 4 of its layers."""
    return tf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        dtype=torch.bfloat16,
    )  # fmt: skip


# bytes


@for_each("name", CONFIGS)
def test_weights_are_those_of_the_model(name):
    model = built(name)
    assert facts(name).weights.nbytes == sum(p.nbytes for p in model.parameters())


@for_each("name", CONFIGS)
def test_a_real_cache_has_the_planned_bytes(name):
    """In layers that kvloom caches, after a prompt; in sliding layers, after one more token."""
    model, found = built(name), facts(name)
    fitting = [spec for spec in RECIPE_SPECS if fits(resolve(spec), spec, found.geometry)]
    assert len(fitting) >= 6
    for spec in fitting:
        recipe = resolve(spec)
        cache = kvloom.Cache(model, recipe)
        ids = torch.randint(3, 199, (2, TOKENS))
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
            planned = CacheBytes(recipe, found)
            assert cache.nbytes == planned.prefill_nbytes(TOKENS, 2), spec
            ours = sum(layer.nbytes for layer in probe.layers(cache))
            assert ours == recipe.nbytes(TOKENS, found.geometry, 2), spec
            model(ids[:, :1], past_key_values=cache, use_cache=True)
            sliding = cache.nbytes - sum(layer.nbytes for layer in probe.layers(cache))
        assert ours + sliding == planned.nbytes(TOKENS, 2), spec
        assert bool(sliding) == bool(found.windows), spec


def fits(recipe, spec, geometry):
    """Whether a model can use a recipe of `RECIPE_SPECS`."""
    return not recipe.problems(geometry) and not (spec.count("@") and geometry.layers < 2)


def test_every_recipe_has_the_bytes_that_it_predicts(llama):
    found = read_model(llama)
    for spec in set(RECIPES) - {"evict", "store", "recall"}:
        recipe = resolve(spec)
        cache = CacheBytes(recipe, found)
        for tokens in (1, 900, 5000):
            try:
                expected = recipe.nbytes(tokens, found.geometry, 3)
            except kvloom.errors.RecipeError:
                assert tokens < 5000, spec
                continue
            assert cache.nbytes(tokens, 3) == expected, (spec, tokens)
            nbytes, held = cache.kinds[0].read(tokens, found.geometry)
            assert 0 < nbytes <= cache.kinds[0].nbytes(tokens, found.geometry), (spec, tokens)
            assert 0 < held <= tokens, (spec, tokens)


@for_each(
    "spec", ["h2o:shared=true", "snapkv:fraction=0.5,heads=0.2,layers=joint", "kvzip:fraction=0.5"]
)
def test_layers_that_wait_for_scores_hold_the_prompt(llama, spec):
    found = read_model(llama)
    cache = CacheBytes(resolve(spec), found)
    assert cache.prefill_nbytes(4000, 2) >= 2 * 4000 * found.geometry.token_nbytes()
    assert cache.nbytes(4000, 2) < 0.6 * cache.prefill_nbytes(4000, 2)


def test_the_working_memory_is_that_of_the_widest_layer(llama):
    """Per token: gate, up and their product, two hidden states, and little more."""
    mlp = 2 * (3 * 14336 + 2 * 4096)
    assert mlp <= read_model(llama).working <= mlp + 2 * 3 * 4096
    assert facts("bloom").working is None


def test_a_tied_matrix_is_read_once_and_an_embedding_by_row(llama):
    untied = read_model(llama).weights
    llama = tf.LlamaConfig(**{**llama.to_dict(), "tie_word_embeddings": True})
    tied = read_model(llama).weights
    embedding = 2 * 128256 * 4096
    assert untied.nbytes - untied.read == embedding
    assert tied.nbytes == tied.read == untied.read
    assert tied.flops(4) == 2 * 4 * tied.parameters


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


@for_each(
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


# inverse questions


@for_each("spec", ["full", "kivi", "rtn", "skvq", "h2o", "snapkv", "minikv", "quest"])
def test_the_longest_context_and_the_largest_batch_fit_and_one_more_does_not(spec, llama):
    memory = 12 << 30
    asked = {"memory": memory, "context": 20000, "batch": 2}
    (row,) = plan(llama, [spec], **asked).rows
    assert row.fits is (row.peak_bytes <= memory)
    for one, limit in ({"context": row.longest_context}, row.longest_context), (
        {"batch": row.largest_batch}, row.largest_batch,
    ):  # fmt: skip
        name = next(iter(one))
        at = plan(llama, [spec], **{**asked, **one}).rows[0]
        beyond = plan(llama, [spec], **{**asked, name: limit + 1}).rows[0]
        assert (at.fits, beyond.fits) == (True, False)
    assert (row.longest_in_chunks == UNLIMITED) == (spec == "snapkv")  # a number of tokens stays
    if spec == "snapkv":
        return
    at, beyond = (
        plan(llama, [spec], **{**asked, "context": row.longest_in_chunks + more}).rows[0]
        for more in (0, 1)
    )
    assert row.longest_in_chunks > row.longest_context
    assert (at.fits_in_chunks, beyond.fits_in_chunks) == (True, False)


def test_the_largest_number_is_found_beyond_a_gap():
    assert largest(lambda n: n <= 1000) == 1000
    assert largest(lambda n: n <= 1000 or 1010 <= n <= 1013) == 1000
    assert largest(lambda n: n <= 1000 or 1010 <= n <= 1013, beyond=20) == 1013
    assert largest(lambda n: False) == 0
    assert largest(lambda n: True) == UNLIMITED


def test_a_target_is_reached_up_to_the_longest_context(llama):
    asked = {"hardware": "a100", "target": 100.0, "batch": 1}
    (row,) = plan(llama, ["full"], context=8192, **asked).rows
    assert row.reaches
    at, beyond = (
        plan(llama, ["full"], context=row.longest_at_target + more, **asked).rows[0]
        for more in (0, 1)
    )
    assert at.reaches
    assert not beyond.reaches


def test_a_target_that_nothing_reaches_names_the_nearest(llama):
    found = plan(llama, ["full", "kivi"], context=8192, hardware="a100", target=9e5)
    assert not any(row.reaches for row in found.rows)
    best = max(found.rows, key=lambda row: row.tokens_s.best)
    assert f"the nearest is {best.recipe} with" in found.warnings[-1]


# time


def test_the_parts_of_a_step_add_up_and_bounds_are_ordered(llama):
    found = plan(llama, ["full", "kivi", "quest"], context=65536, batch=8, hardware="h100")
    for row in found.rows:
        assert sum(row.parts_ms.values()) == pytest.approx(row.step_ms.best)
        assert row.step_ms.low < row.step_ms.best < row.step_ms.high
        assert row.tokens_s.best == pytest.approx(8e3 / row.step_ms.best)
        assert row.tokens_s.low == pytest.approx(8e3 / row.step_ms.high)
        assert [point.context for point in row.curve] == [1024 << i for i in range(7)]
    assert found.rows[0].limit == "KV reads"
    assert found.rows[0].step_ms.best > found.rows[1].step_ms.best > 0


def test_the_roofline_is_bytes_over_rates(llama):
    """With shares of 1, weights and cache are read at the bandwidth, and a layer takes its time."""
    one = Range.exactly(1.0)
    machine = Hardware("x", 10**12, 1e12, 1e15, {}, one, one, one, Range.exactly(0.0))
    model = read_model(llama)
    cache = CacheBytes(resolve("full"), model)
    time = machine.step(step_work(model, cache, 10000, 1))
    nbytes = model.weights.read + 10000 * model.geometry.token_nbytes()
    assert time.total.best == pytest.approx(nbytes / 1e12)
    slow = replace(machine, flops=1e9)
    work = step_work(model, cache, 10000, 1)
    flops = 2 * model.weights.parameters + 4 * 4 * 32 * 128 * 10000
    assert slow.step(work).total.best == pytest.approx(flops / 1e9)
    assert slow.step(work).limit == "arithmetic"
    idle = replace(machine, overhead=Range.exactly(1.0))
    assert idle.step(work).total.best == pytest.approx(4.0)


def test_presets_state_their_sources():
    for name in ("h100", "a100", "rtx4090"):
        data = PRESETS[name].to_dict()
        assert set(data["sources"]) == {"rates", "weights", "kv", "arithmetic", "overhead"}
        assert "NVIDIA" in data["sources"]["rates"]
        assert all(data["sources"].values())
        assert PRESETS[name].notes()


def test_a_tier_has_no_times_on_a_preset(llama):
    (row,) = plan(llama, ["clusterkv-2bit:tier=host"], context=8192, hardware="h100").rows
    assert row.step_ms is None
    assert "moves" in row.no_times or "move" in row.no_times


def test_hardware_from_a_file(tmp_path, llama):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nmemory_gb = 48\nbandwidth_gb_s = 900\ntflops = 150\n'
        'source = "a sheet"\nkv = [0.5, 0.6, 0.7]\noverhead_us = [0, 10, 20]\n'
    )
    found = plan(llama, ["full"], context=1024, hardware=str(path))
    assert found.memory == 48 * 10**9
    assert found.hardware.kv == Range(0.5, 0.6, 0.7)
    assert found.hardware.overhead.high == pytest.approx(20e-6)
    assert found.hardware.sources["kv"] == "a sheet"


@for_each(
    ("text", "says"),
    [
        ("memory_gb = 48", "has no number above 0 for bandwidth_gb_s, tflops"),
        ("memory_gb = 1\nbandwidth_gb_s = 1\ntflops = 1\nspeed = 2", "has unknown fields speed"),
        ("memory_gb = 1\nbandwidth_gb_s = 1\ntflops = 1\nkv = [0.5, 0.4, 0.9]", "ascending"),
        ("memory_gb = ", "cannot be read"),
    ],
)
def test_a_wrong_hardware_file_is_refused(tmp_path, text, says):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=says):
        hardware_file.read_file(path)


# bad input


@for_each(
    ("config", "says"),
    [
        (lambda: tf.T5Config(), "encoder-decoder"),
        (lambda: tf.Qwen3NextConfig(num_hidden_layers=4), "linear attention"),
        (lambda: tf.DeepseekV3Config(num_hidden_layers=2), "MLA"),
        (lambda: tf.MambaConfig(num_hidden_layers=2), "no attention"),
        (
            lambda: tf.LlamaConfig(quantization_config={"quant_method": "hqq"}),
            "quantized by hqq are not counted",
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


def test_less_memory_than_the_weights_need(llama):
    with pytest.raises(
        InputError, match=r"weights of llama take 3\.58 GiB, and there are 2\.00 GiB"
    ):
        plan(llama, memory=2 << 30)


def test_a_context_beyond_the_positions_is_warned_of(llama):
    (warning,) = plan(llama, ["full"], context=200000).warnings
    assert "200,000 tokens exceeds the 131,072 positions" in warning


def test_a_config_without_a_dtype_is_warned_of():
    config = CONFIGS["llama-gqa"]()
    config.dtype = None
    assert "states no dtype" in plan(config, ["full"], context=64).warnings[0]


@for_each(
    ("asked", "says"),
    [
        ({"context": 0}, "context=0 must be a whole number"),
        ({"batch": 1.5}, r"batch=1\.5 must be a whole number"),
        ({"target": 5.0}, "a target speed needs hardware"),
        ({"target": -1.0, "hardware": "h100"}, "above 0"),
        ({"hardware": "h900"}, "hardware 'h900' is unknown; use h100, a100, rtx4090, this"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_read(asked, says, monkeypatch):
    monkeypatch.setattr(plan_recipes, "read_model", lambda model: pytest.fail("read"))
    with pytest.raises(InputError, match=says):
        plan("anything", **asked)


def test_a_recipe_that_does_not_fit_has_a_row_with_the_problem():
    config = CONFIGS["llama-gqa"]()
    found = plan(config, ["full", "rtn:group=128"], context=64)
    assert found.rows[0].problem is None
    assert "group=128 does not divide head_dim=16" in found.rows[1].problem
    assert "rtn:group=128: " in str(found)


def test_a_config_file_and_a_folder_are_read_and_other_files_are_not(tmp_path):
    config = CONFIGS["llama-gqa"]()
    config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert read_model(path).name == tmp_path.name
    (tmp_path / "notes.txt").write_text("no config")
    with pytest.raises(InputError, match="is not a config"):
        read_model(tmp_path / "notes.txt")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no such model"}))
    with pytest.raises(InputError, match="cannot be read"):
        read_model(Path(tmp_path))


@for_each(
    ("parse", "option", "value"),
    [
        (parse_bytes, "24GiB", 24 << 30),
        (parse_bytes, "1.5 gb", 1_500_000_000),
        (parse_bytes, "1000", 1000),
        (parse_tokens, "128k", 131072),
        (parse_tokens, "1M", 1 << 20),
        (parse_tokens, "8192", 8192),
        (parse_rate, "20tok/s", 20.0),
        (parse_rate, "2.5", 2.5),
    ],
)
def test_units(parse, option, value):
    assert parse(option) == value


@for_each(
    ("parse", "option"),
    [
        (parse_bytes, "24 bananas"), (parse_bytes, "0GB"), (parse_bytes, "-1GB"),
        (parse_tokens, "many"), (parse_tokens, "0"), (parse_rate, "0"), (parse_rate, "fast"),
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused(parse, option):
    with pytest.raises(InputError, match="give"):
        parse(option)
