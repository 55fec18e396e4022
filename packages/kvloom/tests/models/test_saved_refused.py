"""Files that are no saved cache of this model, and places no file can be written to."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
import zoo
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import kvloom
from backends import by_reference
from kvloom.cache.layer_state import VERSION
from kvloom.errors import SavedCacheError, UnsupportedModel
from kvloom.hf import save
from kvloom.hf.layer_facts import identity, sample
from kvloom.store import files

pytestmark = by_reference  # none of this depends on kernels


@pytest.fixture
def kivi():
    """A model and a cache of a short prompt."""
    model = zoo.build("llama-gqa", head_dim=32)
    cache = kvloom.Cache(model, "kivi:group=16,residual=32")
    with torch.no_grad():
        model(**zoo.batch(3, 70, (0, 17, 60)), past_key_values=cache)
    return model, cache


def refused(model, path) -> str:
    with pytest.raises(SavedCacheError) as error:
        kvloom.Cache.load(model, path)
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)
    return str(error.value)


def rewrite(path, **changes) -> None:
    """Write other metadata into a file, with the checksum that belongs to it."""
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["kvloom_cache"])
    tensors = load_file(path)
    del tensors[files.CHECKSUM]
    about = {"kvloom_cache": json.dumps({**about, **changes})}
    files.write(path, tensors, about, AssertionError)


def test_positions_that_the_model_moves_itself_are_not_saved(tmp_path):
    """A file would continue at other positions: the model keeps an image's size, not the cache."""
    model, path = zoo.build_with_images("qwen2-vl"), tmp_path / "c.kv"
    prompt = zoo.image_prompt(model, 30, 30)
    cache = kvloom.Cache(model, "full")
    with torch.no_grad():
        model(**prompt, past_key_values=cache)
        with pytest.raises(SavedCacheError, match="moves the positions after images"):
            cache.save(path)
        assert not path.exists()
        text = kvloom.Cache(model, "full")
        model.generate(torch.randint(3, 90, (1, 20)), past_key_values=text, max_new_tokens=2)
    text.save(path)


def test_what_is_no_saved_cache_is_refused(kivi, tmp_path):
    model, cache = kivi
    path = tmp_path / "prefix.kv"
    assert "there is no saved cache" in refused(model, path)
    cache.save(path)
    whole = path.read_bytes()
    for cut in (0, 5, 300, -1):
        path.write_bytes(whole[:cut])
        assert "is damaged, or was never a saved cache" in refused(model, path)
    save_file({"w": torch.ones(2)}, path)
    assert "safetensors, but no saved cache" in refused(model, path)
    for text in ("[]", "3", "null", "{}"):
        save_file({"w": torch.ones(2)}, path, {"kvloom_cache": text})
        assert "safetensors, but no saved cache" in refused(model, path)
    about = {"kvloom_cache": json.dumps({"format": VERSION})}
    save_file({"w": torch.ones(2)}, path, about)
    assert "is damaged: its checksum is wrong" in refused(model, path)
    files.write(path, {"w": torch.ones(2)}, about, AssertionError)
    assert "is damaged: its recipe is missing; prefill and save" in refused(model, path)
    path.write_bytes(whole)
    rewrite(path, format="99-0", kvloom="9.0")
    both = f"format 99-0 of kvloom 9.0, and this kvloom ({kvloom.__version__}) reads {VERSION}"
    assert both in refused(model, path)
    for former in ("2-2a60c7f1", 1):
        path.write_bytes(whole)
        rewrite(path, format=former)
        assert f"has cache format {former} of kvloom" in refused(model, path)
    path.write_bytes(whole)
    rewrite(path, layers=[])
    assert "cannot be restored (ValueError: zip() argument 2 is shorter" in refused(model, path)


@pytest.mark.parametrize("seen", [-1, 2**31, "text", None])
def test_a_number_of_tokens_that_no_text_has_is_refused(kivi, tmp_path, seen):
    """A step would make a mask of so many tokens."""
    model, cache = kivi
    path = tmp_path / "prefix.kv"
    cache.save(path)
    layers = save.read(path)["layers"]
    layers[0][0]["seen"] = seen
    rewrite(path, layers=layers)
    assert "cannot be restored" in refused(model, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"store": {"keys": {"bits": 5, "axis": "channel"}}}, "bits=5 is not one of 1, 1.5"),
        ({"stores": {}}, "Recipe has no field 'stores'"),
        ("kivi", "recipe must be a table of keep, store"),
        (None, "recipe must be a table of keep, store"),
    ],
)
def test_a_damaged_recipe_is_a_damaged_file(kivi, tmp_path, damage, says):
    model, cache = kivi
    path = tmp_path / "prefix.kv"
    cache.save(path)
    rewrite(path, recipe=damage)
    assert f"({kvloom.__version__}) does not know: {says}" in refused(model, path)


def test_a_model_without_its_weights_is_not_told_from_others(kivi, tmp_path):
    model, cache = kivi
    path = tmp_path / "prefix.kv"
    cache.save(path)
    with torch.device("meta"):
        empty = type(model)(model.config)
    for ask in (lambda: kvloom.Cache.load(empty, path), lambda: identity(empty)):
        with pytest.raises(UnsupportedModel, match=r"as model\.embed.* is on the meta device"):
            ask()


def test_another_model_dtype_or_rope_is_refused_before_anything_is_changed(kivi, tmp_path):
    path = tmp_path / "prefix.kv"
    kivi[1].save(path)
    other = zoo.build("qwen3")
    says = refused(other, path)
    assert "a cache of LlamaForCausalLM with model=LlamaForCausalLM, head_dim=32, weights=" in says
    assert "this model is Qwen3ForCausalLM with model=Qwen3ForCausalLM, head_dim=16" in says
    tuned = zoo.build("llama-gqa", seed=1, head_dim=32)
    assert "LlamaForCausalLM with weights=" in refused(tuned, path)
    half = zoo.build("llama-gqa", head_dim=32).bfloat16()
    assert "this model is LlamaForCausalLM with dtype=bfloat16;" in refused(half, path)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    longer = zoo.build("llama-gqa", head_dim=32, rope_parameters=rope)
    assert "rope_parameters={'rope_type': 'linear'" in refused(longer, path)
    assert all(getattr(m, "_kvloom", None) is None for m in (other, tuned, half, longer))


@pytest.mark.parametrize("change", ["scaling", "variance_epsilon", "inv_freq"])
def test_another_attribute_of_a_module_is_refused(kivi, tmp_path, change):
    path = tmp_path / "prefix.kv"
    kivi[1].save(path)
    model = zoo.build("llama-gqa", head_dim=32)
    kvloom.Cache.load(model, path)
    kvloom.detach(model)
    layer = model.model.layers[1]
    if change == "scaling":
        layer.self_attn.scaling = 0.05
    elif change == "variance_epsilon":
        layer.input_layernorm.variance_epsilon = 1.0
    else:
        model.model.rotary_emb.inv_freq *= 0.5
    assert (change if change != "inv_freq" else "weights") in refused(model, path)


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("gptj", {"rotary_dim": 16}, "rotary_dim"),
        ("smollm3", {"no_rope_layers": [1, 1, 1]}, "no_rope_layers"),
        ("falcon-mqa", {"alibi": True}, "alibi"),
        ("llama-gqa", {"rms_norm_eps": 0.1}, "rms_norm_eps"),
        ("llama-gqa", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_another_config_is_refused(name, options, field, tmp_path):
    model, path = zoo.build(name), tmp_path / "prefix.kv"
    cache = kvloom.Cache(model, "full")
    model(**zoo.batch(), past_key_values=cache)
    cache.save(path)
    assert f"{field}={options[field]}" in refused(zoo.build(name, **options), path)
    same = zoo.build(name)
    same.config.pad_token_id, same.config.use_cache = 1, False
    assert kvloom.Cache.load(same, path).get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("part", ["embed_tokens.weight", "layers.0.mlp.down_proj.weight"])
def test_weights_whose_first_numbers_are_the_same_are_refused(kivi, part, tmp_path):
    path, tuned = tmp_path / "prefix.kv", zoo.build("llama-gqa", head_dim=32)
    kivi[1].save(path)
    tuned.model.get_parameter(part).data[1:] += 1
    assert "LlamaForCausalLM with weights=" in refused(tuned, path)


def test_a_sample_of_a_matrix_shows_columns_and_rows_that_change():
    flat = torch.arange(256 * 256.0)
    for changed in (slice(None), slice(64, 128)), (slice(64, 128), slice(None)):
        other = flat.clone()
        other.view(256, 256)[changed] = -1
        assert 8 < (sample(flat) != sample(other)).sum() < 24  # of 64, a quarter
    assert torch.equal(sample(flat[:64]), flat[:64])


def test_a_file_that_cannot_be_written_leaves_the_one_before(kivi, tmp_path, monkeypatch):
    _, cache = kivi
    path = tmp_path / "prefix.kv"
    cache.save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SavedCacheError, match=r"prefix\.kv' cannot be written: No space left"):
        cache.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    for nowhere in (tmp_path / "none" / "p.kv", path / "p.kv", tmp_path, "."):
        with pytest.raises(SavedCacheError, match="cannot be written"):
            cache.save(nowhere)
    assert [p.name for p in tmp_path.iterdir()] == ["prefix.kv"]


def test_a_model_on_the_meta_device_is_identified_by_its_weights_elsewhere():
    model = zoo.build("llama-gqa", seed=1, head_dim=32)
    weights = dict(model.named_parameters())
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert identity(empty, read=lambda name: weights[name].reshape(-1)[:20]) == identity(model)
