"""Calibrating whole models: what is found, resuming, and whose calibration it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from zoo import batch, build

import kvloom
import probe
from backends import by_reference
from kvloom.calibrate import Settings, calibrate, cut_contexts
from kvloom.calibrate.ranges import _share_added
from kvloom.calibrate.recorder import record
from kvloom.errors import CalibrationError, IncompatibleRecipe, NotFinite
from kvloom.hf import rotary
from kvloom.recipe.resolve import resolve
from kvloom.store.calibration import Calibration

pytestmark = by_reference  # none of this depends on kernels

SETTINGS = Settings(
    contexts=6, context=64, settled=0.0, sample_contexts=2, sample_tokens=64, queries=8, recent=8
)
SKVQ = "skvq:group=16,window=8,sinks=2"
OTHERS = [
    f"{SKVQ},outliers=4",
    "skvq:group=32,bits=4,value_bits=1.5,window=0",
    "rptq:group=16",
    "smoothquant:group=16",
]


def ids(seed=0, count=6) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, 199, (count, 64), generator=g)


def divergence(got, want) -> float:
    """The largest KL divergence of next-token distributions."""
    logs = got.log_softmax(-1), want.log_softmax(-1)
    each = torch.nn.functional.kl_div(*logs, log_target=True, reduction="none").sum(-1)
    return each.max().item()


def calibrated(model, path, recipes=(SKVQ,), settings=SETTINGS, **more) -> Calibration:
    return calibrate(model, ids(), [resolve(r) for r in recipes], path, settings, **more)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model and the file of its calibration."""
    model, path = build("llama-gqa"), tmp_path_factory.mktemp("llama") / "c.kvcal"
    calibrated(model, path, [SKVQ, *OTHERS])
    return model, path


def test_ranges_are_those_of_the_keys_and_values(llama):
    model, path = llama
    found, cache = Calibration.load(path), kvloom.Cache(model, "full")
    with torch.inference_mode():
        model(input_ids=ids(), past_key_values=cache)
    rope, at = rotary.layer_ropes(model)[0], torch.arange(64).view(1, 1, -1)
    for number, layer in enumerate(probe.layers(cache)):
        body = probe.tokens(layer)
        k, v = body.keys.tail.view(), body.values.tail.view()
        for kind, x in (("keys", k), ("raw_keys", rope.rotate(k, -at)), ("values", v)):
            low, high = found.ranges(number, kind)
            torch.testing.assert_close(low, x.amin(dim=(0, 2)), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(high, x.amax(dim=(0, 2)), rtol=1e-4, atol=1e-4)


@pytest.mark.sample
@pytest.mark.parametrize("spec", [SKVQ, *OTHERS])
@pytest.mark.parametrize("pads", [(0, 0), (0, 17)])
def test_calibrated_recipes_generate_and_hold_what_is_predicted(llama, spec, pads):
    model, path = llama
    recipe = resolve(f"{spec},calibration={path}")
    cache = kvloom.Cache(model, recipe)
    inputs = batch(2, 61, pads)
    with torch.inference_mode():
        model(**inputs, past_key_values=cache)
    predicted = recipe.nbytes(61, cache.geometry, batch=2)
    if any(pads):  # the padding, and each row's first token where keys are turned
        predicted += 2 * 17 + (3 * 16 if recipe.store.pre_rope else 0)
    assert cache.nbytes == predicted
    out = model.generate(**inputs, past_key_values=kvloom.Cache(model, recipe), max_new_tokens=8,
                         do_sample=False)  # fmt: skip
    assert out.shape == (2, 69)


@pytest.mark.parametrize(
    "name", ["llama-gqa", "glm4", "gpt-neox", "qwen3", "phi3", "gemma2", "stablelm", "gptj"]
)
def test_fine_codes_before_rope_are_nearly_exact(name):
    """Partial rotary and both pairings: 8 bits of keys before RoPE change hardly anything."""
    model, inputs = build(name), batch(3, 61)
    recipe = kvloom.Recipe(
        store=kvloom.Store(keys=kvloom.Packed(8, "token", 16, "fp32", pre_rope=True))
    )
    outs = []
    for chosen in ("full", recipe):
        cache = kvloom.Cache(model, chosen)
        with torch.inference_mode():
            model(**inputs, past_key_values=cache)
            mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], dim=1)
            new = torch.randint(3, 199, (3, 4), generator=torch.Generator().manual_seed(1))
            outs.append(model(input_ids=new, attention_mask=mask, past_key_values=cache).logits)
    assert divergence(outs[1], outs[0]) < 1e-5


def test_positions_matter_to_keys_before_rope():
    """The test above can fail: keys turned back at other positions than they came from."""
    model, inputs = build("llama-gqa"), batch(3, 61)
    fmt = kvloom.Packed(8, "token", 16, "fp32", pre_rope=True)
    cache = kvloom.Cache(model, kvloom.Recipe(store=kvloom.Store(keys=fmt)))
    full = kvloom.Cache(model, "full")
    new = torch.randint(3, 199, (3, 1))
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    with torch.inference_mode():
        for c in (cache, full):
            model(**inputs, past_key_values=c)
        for layer in probe.layers(cache):
            probe.tokens(layer).start += 5
        got, want = (
            model(input_ids=new, attention_mask=mask, past_key_values=c).logits
            for c in (cache, full)
        )
    assert divergence(got, want) > 1e-3


class Stop(Exception):
    pass


@pytest.mark.parametrize("after", [3, 7, 8])
def test_an_interrupted_calibration_goes_on_and_ends_the_same(tmp_path, after, monkeypatch):
    monkeypatch.setattr("kvloom.calibrate.ranges._CHECK_EVERY", 2)
    model, told = build("llama-gqa"), []
    whole = calibrated(model, tmp_path / "whole.kvcal")

    def stop(what, at, of):
        told.append(what)
        if len(told) > after:
            raise Stop

    with pytest.raises(Stop):
        calibrated(model, tmp_path / "c.kvcal", progress=stop)
    assert not (tmp_path / "c.kvcal").exists()
    assert (tmp_path / "c.kvcal.partial").exists()
    steps = []
    found = calibrated(model, tmp_path / "c.kvcal", progress=lambda *a: steps.append(a))
    assert steps[0] != ("reading contexts", 0, 6)  # what was read is not read again
    assert found.tensors.keys() == whole.tensors.keys()
    assert all(torch.equal(found.tensors[n], x) for n, x in whole.tensors.items())
    assert not (tmp_path / "c.kvcal.partial").exists()


def test_reading_ends_once_the_ranges_have_settled(tmp_path, monkeypatch):
    """Two checks are needed; what they compare and that all was read survives an interruption."""
    monkeypatch.setattr("kvloom.calibrate.ranges._CHECK_EVERY", 2)
    model, easy = build("llama-gqa"), replace(SETTINGS, settled=0.9)
    found = calibrated(model, tmp_path / "easy.kvcal", settings=easy)
    assert found.settings["read"] == 4
    assert calibrated(model, tmp_path / "all.kvcal").settings["read"] == 6
    four = calibrate(model, ids()[:4], [resolve(SKVQ)], tmp_path / "four.kvcal", SETTINGS)
    assert all(torch.equal(found.tensors[n], x) for n, x in four.tensors.items())
    for after in (3, 5):  # while reading, and after it
        path, steps = tmp_path / f"{after}.kvcal", []

        def stop(*step, steps=steps, after=after):
            steps.append(step)
            if len(steps) > after:
                raise Stop

        with pytest.raises(Stop):
            calibrated(model, path, settings=easy, progress=stop)
        assert calibrated(model, path, settings=easy).settings["read"] == 4


def test_the_share_of_a_range_that_is_new():
    before = {"a": torch.tensor([[[0.0, -1.0]], [[3.0, 1.0]]]), "b": torch.zeros(2, 1, 1)}
    now = {"a": torch.tensor([[[-1.0, -1.0]], [[3.0, 1.0]]]), "b": torch.tensor([[[0.0]], [[2.0]]])}
    assert _share_added(before, now) == pytest.approx((1 / 8 + 1) / 2)
    assert _share_added(now, now) == 0
    assert _share_added({"b": before["b"]}, {"b": before["b"]}) == 0  # constant channels


def test_a_state_of_other_settings_is_not_taken_up(tmp_path):
    model, path = build("llama-gqa"), tmp_path / "c.kvcal"
    other = Calibration({"model": "another"})
    other.save(tmp_path / "c.kvcal.partial")
    steps = []
    calibrated(model, path, progress=lambda *a: steps.append(a))
    assert steps[0] == ("reading contexts", 0, 6)


def test_calibrating_leaves_the_model_as_it_was(tmp_path):
    model = build("llama-gqa")
    before = model(input_ids=ids()).logits
    calibrated(model, tmp_path / "c.kvcal")
    assert getattr(model, "_kvloom", None) is None
    assert torch.equal(model(input_ids=ids()).logits, before)


# --- refusals ------------------------------------------------------------------------------------


def refused(model, spec) -> str:
    with pytest.raises(IncompatibleRecipe) as error:
        kvloom.attach(model, spec)
    routing = getattr(model, "_kvloom", None)
    assert routing is None or routing.attached.recipe is None
    with pytest.raises(IncompatibleRecipe):
        kvloom.Cache(model, spec)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_model_without_a_calibration_says_how_to_get_one():
    message = refused(build("llama-gqa"), "skvq:group=16")
    assert "kvloom calibrate MODEL --text FILE" in message
    assert "calibration=calibration.kvcal" in message


def test_a_calibration_beside_the_weights_is_found(llama, tmp_path):
    model, path = llama
    model.save_pretrained(tmp_path)
    (tmp_path / "calibration.kvcal").write_bytes(path.read_bytes())
    loaded = type(model).from_pretrained(tmp_path)
    report = kvloom.attach(loaded, SKVQ)
    assert report.compressed == (0, 1, 2)


def test_another_models_calibration_is_refused_by_name(llama):
    _, path = llama
    for other in (build("llama-gqa", seed=1), build("llama-mha")):
        message = refused(other, f"{SKVQ},calibration={path}")
        assert (
            "is the calibration of LlamaForCausalLM (3 layers, 2 key/value heads of 16" in message
        )
        assert "and this is LlamaForCausalLM" in message


def test_the_same_weights_in_another_dtype_are_the_same_model(llama):
    _, path = llama
    kvloom.Cache(build("llama-gqa").to(torch.bfloat16), f"{SKVQ},calibration={path}")


def test_a_format_that_was_not_calibrated_is_refused(llama):
    model, path = llama
    message = refused(model, f"skvq:group=16,bits=3,calibration={path}")
    assert "was not made for keys at 3 bit in groups of 16" in message
    assert "--recipes" in message


def test_a_damaged_or_missing_file_is_refused(llama, tmp_path):
    model, path = llama
    (tmp_path / "cut.kvcal").write_bytes(path.read_bytes()[:-10])
    assert "damaged" in refused(model, f"{SKVQ},calibration={tmp_path}/cut.kvcal")
    assert "there is no calibration" in refused(model, f"{SKVQ},calibration={tmp_path}/none")


def test_a_group_larger_than_the_layer_is_refused(llama):
    model, path = llama
    message = refused(model, f"skvq:group=64,calibration={path}")
    assert "group=64 does not divide the layer's channels=32; use 16 or 32" in message


@pytest.mark.parametrize("name", ["gpt2", "mpt", "bloom"])
def test_models_without_rope_are_refused_before_rope_and_calibrated_after_it(tmp_path, name):
    model, path = build(name), tmp_path / "c.kvcal"
    with pytest.raises(CalibrationError, match=f"{type(model).__name__} has no rotary embedding"):
        calibrated(model, path)
    after = f"{SKVQ},pre_rope=false,outliers=4"
    calibrated(model, path, [after])
    outs = []
    for spec in ("full", f"{after},bits=8,value_bits=8,clip=1.0,meta=fp32"):
        cache = kvloom.Cache(model, spec if spec == "full" else f"{spec},calibration={path}")
        with torch.inference_mode():
            model(input_ids=ids(), past_key_values=cache)
            outs.append(model(input_ids=ids(1)[:, :3], past_key_values=cache).logits)
    assert divergence(outs[1], outs[0]) < 1e-4
    fmt = kvloom.Packed(2, "token", 16, pre_rope=True)
    message = refused(build(name), kvloom.Recipe(store=kvloom.Store(keys=fmt)))
    assert "has no rotary embedding" in message


@pytest.mark.parametrize("name", ["gpt-oss", "gemma4-shared"])
def test_the_recorded_model_is_the_plain_model(name):
    """With attention sinks, and with layers that share the keys and values of another."""
    model, outputs, numbers = build(name), [], []
    model.base_model.norm.register_forward_hook(lambda *hook: outputs.append(hook[2]))
    with torch.inference_mode():
        model(input_ids=ids(count=2))
    record(model, ids(count=2), lambda number, _: numbers.append(number))
    torch.testing.assert_close(outputs[-1], outputs[0], rtol=1e-4, atol=1e-5)
    assert numbers == [0, 2]


def test_too_little_text_is_refused():
    with pytest.raises(CalibrationError, match="has 200 tokens, and calibration needs 4 contexts"):
        cut_contexts(np.arange(200), [1], SETTINGS)
    cut = cut_contexts(np.arange(300), [1], SETTINGS)
    assert cut.shape == (4, 64)
    assert cut[:, 0].tolist() == [1] * 4
    assert len(cut[:, 1:].flatten().unique()) == 4 * 63  # never the same token twice


def test_contexts_without_tokens_to_clip_are_refused(tmp_path):
    ids, out = torch.randint(3, 190, (2, 200)), tmp_path / "c.kvcal"
    with pytest.raises(CalibrationError, match="have 200; use contexts of 266 tokens or more"):
        calibrate(build("llama-gqa"), ids, [resolve("skvq:group=32")], out, Settings())
    assert not out.exists()


def test_nan_in_a_layer_is_refused_by_layer_and_side(tmp_path):
    model = build("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[3] = torch.nan
    with pytest.raises(NotFinite, match="layer 1: NaN or infinity in values"):
        calibrated(model, tmp_path / "c.kvcal")


def test_constant_channels_are_no_trouble(tmp_path):
    model, path = build("llama-gqa"), tmp_path / "c.kvcal"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[:20] = 0.0
    found = calibrated(model, path, [SKVQ, *OTHERS])
    assert all(torch.isfinite(x.float()).all() for x in found.tensors.values())
    for spec in (SKVQ, *OTHERS):
        cache = kvloom.Cache(model, f"{spec},calibration={path}")
        with torch.inference_mode():
            assert torch.isfinite(model(input_ids=ids(), past_key_values=cache).logits).all()
