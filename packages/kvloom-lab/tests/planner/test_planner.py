"""Plans: bytes equal those of real caches, inverse questions agree, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from planned_models import CONFIGS, FAMILIES, built, facts
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
)

import kvloom
import probe
from kvloom.errors import InputError
from kvloom.hf import stock
from kvloom.kernels import use_backend
from kvloom.recipe.resolve import RECIPES, resolve
from kvloom_lab.models import load_model
from kvloom_lab.planner import read_model
from kvloom_lab.planner.model import _Live
from kvloom_lab.planner.plan_recipes import RecipePlanner, plan
from kvloom_lab.planner.step import CHUNK, CacheBytes
from kvloom_lab.planner.units import UNLIMITED, largest_fitting

TOKENS = 300
RECIPE_SPECS = (
    "full", "kivi:group=16", "h2o", "snapkv:tokens=100", "pyramidkv:tokens=100,window=8",
    "quest:page=4,tokens=64,recent=8,full_layers=1", "streaming:tokens=50",
    "kivi:group=16@first 1=full@last 1=kivi:bits=4,group=16",
)  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_real_cache_has_the_planned_bytes(name, monkeypatch):
    model, found = built(name), facts(name)
    if name == "paligemma":  # under sdpa, its text attends to later tokens
        model.set_attn_implementation("eager")
    release, before = stock.release, []

    def note_and_release(layers):
        before.append(sum(map(stock.nbytes, layers)))
        release(layers)

    monkeypatch.setattr(stock, "release", note_and_release)
    fitting = [spec for spec in RECIPE_SPECS if fits(resolve(spec), spec, found.geometry)]
    assert len(fitting) >= (6 if found.geometry.layers else 1)
    for spec in fitting:
        recipe = resolve(spec)
        cache = kvloom.Cache(model, recipe)
        ids = torch.randint(3, 199, (2, TOKENS))
        with torch.no_grad():
            model(ids, past_key_values=cache, use_cache=True)
            planned = CacheBytes(recipe, found)
        ours = sum(layer.nbytes for layer in probe.layers(cache))
        assert ours + before.pop() == planned.prefill_nbytes(TOKENS, 2), spec
        assert ours == recipe.nbytes(TOKENS, found.geometry, 2), spec
        others = cache.nbytes - ours
        assert cache.nbytes == planned.nbytes(TOKENS, 2), spec
        assert bool(others) == bool(found.geometry.sliding or found.states), spec
        assert cache.state_nbytes == 2 * sum(found.states), spec


@pytest.mark.sample
@pytest.mark.parametrize("name", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("chunk", [7, 37, 256])
def test_a_cache_that_grows_by_chunks_has_at_most_the_planned_bytes(name, chunk):
    model, found = built(name), facts(name)
    specs = [
        *RECIPE_SPECS, "near-lossless:group=16", "turbo", "rtn:group=16", "small:group=16",
        "kvzip:tokens=64", "minikv:group=16", "h2o:tokens=64,limit=150",
    ]  # fmt: skip
    for spec in specs:
        recipe = resolve(spec)
        if not fits(recipe, spec, found.geometry):
            continue
        cache, planned = kvloom.Cache(model, recipe), CacheBytes(recipe, found)
        ids = torch.randint(3, 199, (2, TOKENS))
        with torch.no_grad():
            for end in range(chunk, TOKENS + 1, chunk):
                model(ids[:, end - chunk : end], past_key_values=cache, use_cache=True)
                assert cache.nbytes <= planned.chunked_nbytes(end, 2), (spec, end)


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


@pytest.mark.parametrize(
    "spec",
    ["h2o:shared=true", "snapkv:fraction=0.5,head_share=0.2,layers=joint", "kvzip:fraction=0.5"],
)
def test_layers_that_wait_for_scores_hold_the_prompt(llama, spec):
    found = read_model(llama)
    cache = CacheBytes(resolve(spec), found)
    assert cache.prefill_nbytes(4000, 2) >= 2 * 4000 * found.geometry.token_nbytes()
    assert cache.nbytes(4000, 2) < 0.6 * cache.prefill_nbytes(4000, 2)


def test_the_working_memory_is_that_of_the_widest_layer(llama):
    """Per token: gate, up and their product, two hidden states, and little more."""
    mlp = 2 * (3 * 14336 + 2 * 4096)
    assert mlp <= read_model(llama).activations.nbytes(1000, 1) / 1000 <= mlp + 2 * 3 * 4096
    assert facts("bloom").activations is None


@pytest.mark.parametrize(("mlp", "low", "high"), [(1536, 0.97, 1.05), (64, 0.93, 1.07)])
@pytest.mark.parametrize(
    "recipe", ["full", "near-lossless", "h2o", "small", "kvzip:fraction=0.5", "infinigen", "quest"]
)
def test_the_peak_is_that_of_the_tensors_that_live_in_a_prompt(recipe, mlp, low, high):
    """With a narrow MLP, scoring a prompt takes most."""
    config = LlamaConfig(
        num_hidden_layers=8, vocab_size=199, hidden_size=576, intermediate_size=mlp, head_dim=64,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=4096,
    )  # fmt: skip
    assert low < held_over_planned(config, recipe) < high


@pytest.mark.parametrize("config", [Cohere2Config, Gemma2Config, Gemma3TextConfig])
def test_the_peak_with_windows_counts_their_masks_and_logits(config):
    """Gemma 2 caps logits, so transformers computes all of them in layers with windows."""
    made = config(
        num_hidden_layers=6, vocab_size=199, hidden_size=256, intermediate_size=512, head_dim=32,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096,
        sliding_window=300,
    )  # fmt: skip
    assert 0.93 < held_over_planned(made, "full") < 1.01
    made.sliding_window = 2048
    assert 0.93 < held_over_planned(made, "full") < 1.01


def held_over_planned(config, recipe):
    """Return the bytes alive at once in a prompt of 2,048 tokens over the planned peak."""
    config.dtype = torch.bfloat16
    found = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    live = _Live([*found.parameters(), *found.buffers()])
    cache = kvloom.Cache(found, recipe, check=False)
    ids = torch.randint(3, 199, (1, 2048))
    with torch.no_grad(), use_backend("auto"), live:
        found(ids, past_key_values=cache, logits_to_keep=1)
    row = plan(config, [recipe], context=2048).rows[0]
    planned = row.peak_bytes - sum(x.nbytes for x in found.parameters())
    return live.most / planned


# inverse questions


@pytest.mark.parametrize(
    "spec", ["full", "kivi", "rtn", "skvq", "h2o", "snapkv", "minikv", "quest", "streaming"]
)
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
    assert (row.longest_in_chunks == UNLIMITED) == (spec == "streaming")
    if spec == "streaming":  # a number of tokens stays
        return
    at, beyond = (
        plan(llama, [spec], **{**asked, "context": row.longest_in_chunks + more}).rows[0]
        for more in (0, 1)
    )
    assert row.longest_in_chunks > row.longest_context
    assert (at.fits_in_chunks, beyond.fits_in_chunks) == (True, False)


def test_up_to_compress_after_all_tokens_are_exact_and_read(llama):
    found = read_model(llama)
    exact, after = CacheBytes(resolve("full"), found), 4096
    for spec in ("near-lossless", "small", "quest:full_layers=0"):
        cache = CacheBytes(resolve(f"{spec},compress_after={after}" if ":" in spec
                                   else f"{spec}:compress_after={after}"), found)  # fmt: skip
        (kind,) = cache.kinds
        assert kind.read(after, found.geometry) == (exact.nbytes(after, 1) // 4, after)
        assert kind.read(2 * after, found.geometry)[0] < exact.nbytes(2 * after, 1) // 4
        assert cache.chunked_nbytes(2 * after, 1) >= exact.nbytes(after, 1)


def test_a_context_may_fit_beyond_compress_after_alone(llama):
    found = read_model(llama)
    memory = CacheBytes(resolve("full"), found).chunked_nbytes(8000, 1)
    in_chunks = found.weights.nbytes + memory + found.activations.nbytes(CHUNK, 1)
    cache = CacheBytes(resolve("near-lossless:compress_after=16384"), found)
    planner = RecipePlanner(found, 8000, 1, in_chunks, None, None)
    assert planner.longest(cache, lambda n: cache.nbytes(n, 1) <= memory) > 16384
    assert 7000 < planner.longest(cache, lambda n: planner.fits_in_chunks(cache, n)) <= 8000


def test_the_largest_number_is_found_beyond_a_gap():
    assert largest_fitting(lambda n: n <= 1000) == 1000
    assert largest_fitting(lambda n: n <= 1000 or 1010 <= n <= 1013) == 1000
    assert largest_fitting(lambda n: n <= 1000 or 1010 <= n <= 1013, beyond=20) == 1013
    assert largest_fitting(lambda n: False) == 0
    assert largest_fitting(lambda n: True) == UNLIMITED


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


def test_less_memory_than_the_weights_need(llama):
    with pytest.raises(
        InputError, match=r"weights of llama take 3\.58 GiB, and there are 2\.00 GiB"
    ):
        plan(llama, memory=2 << 30)


def test_a_context_beyond_the_positions_is_warned_of(llama):
    (warning,) = plan(llama, ["full"], context=200000).warnings
    assert "200,000 tokens exceeds the 131,072 positions" in warning


def test_layers_of_images_alone_are_warned_of():
    (warning,) = plan(FAMILIES["mllama"](), ["full"], context=64).warnings[-1:]
    assert "They store 0.25 KiB for each token of an image" in warning  # 2 x 2 heads x 16 x 4 bytes


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"context": 0}, "context=0 must be a whole number"),
        ({"batch": 1.5}, r"batch=1\.5 must be a whole number"),
        ({"target": 5.0}, "a target speed needs hardware"),
        ({"target": -1.0, "hardware": "h100"}, "above 0"),
        ({"hardware": "h900"}, "hardware 'h900' is unknown; use h100, h200, b200"),
    ],
)
def test_wrong_settings_are_refused_before_the_model_is_read(asked, says, monkeypatch):
    monkeypatch.setattr(
        "kvloom_lab.planner.plan_recipes.read_model", lambda model: pytest.fail("read")
    )
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


def test_a_model_of_images_and_text_is_planned_and_loaded(tmp_path):
    built("qwen2-vl").save_pretrained(tmp_path)
    loaded = type(load_model(str(tmp_path))).__name__
    assert read_model(tmp_path).architecture == loaded == "Qwen2VLForConditionalGeneration"
