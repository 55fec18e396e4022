"""A model of an untested class is compared with the plain model, and refused if it differs."""

from types import SimpleNamespace

import pytest
import torch
import transformers as tf
import zoo
from test_misuse import untouched
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvloom
from backends import by_reference
from kvloom.errors import CacheMisuse, UnsupportedModel
from kvloom.hf import self_check
from kvloom.hf.rotary import layer_ropes

pytestmark = by_reference


class NewLlama(tf.LlamaForCausalLM):
    """A class that no test covers."""


def flatter(module, query, key, value, mask, scaling, **rest):
    """An attention that kvloom does not compute."""
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling / 2, **rest)


tf.AttentionInterface.register("flatter", flatter)
tf.AttentionMaskInterface.register("flatter", tf.masking_utils.sdpa_mask)


def new_model(attention: str = "sdpa"):
    model = zoo.build("llama-gqa")
    model.__class__ = NewLlama
    model.set_attn_implementation(attention)
    return model


@pytest.fixture
def prompts(monkeypatch):
    """The tokens of each call of a model with more than one token a row."""
    seen, forward = [], tf.LlamaModel.forward

    def counting(self, *args, **kwargs):
        ids = kwargs["input_ids"]
        seen.extend([ids.shape[1]] if ids.shape[1] > 1 else [])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(tf.LlamaModel, "forward", counting)
    return seen


def test_an_untested_class_is_compared_once_by_two_prompts(prompts):
    model = new_model()
    kvloom.attach(model, "kivi:group=16")
    assert prompts == [24, 24]
    kvloom.detach(model)
    kvloom.Cache(model, "full")
    assert prompts == [24, 24]


def test_a_tested_class_and_check_false_run_nothing(prompts):
    kvloom.attach(zoo.build("llama-gqa"), "full")
    kvloom.attach(new_model("flatter"), "full", check=False)
    kvloom.Cache(new_model("flatter"), "full", check=False)
    assert prompts == []


@pytest.mark.parametrize("build", [new_model, lambda how: zoo.build("llama-gqa")])
@pytest.mark.parametrize("use", [kvloom.attach, kvloom.Cache])
def test_a_model_that_differs_is_refused_with_the_difference(use, build):
    model = build("flatter")
    model.set_attn_implementation("flatter")
    with pytest.raises(UnsupportedModel, match=r"differ by 0\.\d+ of their spread"):
        use(model, "kivi:group=16")
    assert untouched(model)


def test_an_attention_set_after_the_first_cache_is_compared_too():
    model, batch = zoo.build("llama-gqa"), zoo.batch(padding=(0, 0, 0))
    cache = kvloom.Cache(model, "full")
    model(**batch, past_key_values=cache)
    seen, token = cache.get_seq_length(), batch["input_ids"][:, :1]
    model.set_attn_implementation("eager")
    model(token, past_key_values=cache)
    model.set_attn_implementation("flatter")
    with pytest.raises(CacheMisuse, match="attends by 'flatter' since this cache was made"):
        model(token, past_key_values=cache)
    assert cache.get_seq_length() == seen + 1
    with pytest.raises(UnsupportedModel, match="differ by"):
        kvloom.Cache(model, "full")
    model.set_attn_implementation("sdpa")
    kvloom.attach(model, "full")
    model(**batch)
    model.set_attn_implementation("flatter")
    with pytest.raises(UnsupportedModel, match="differ by"):
        model(**batch)


def test_another_function_by_the_name_of_one_of_transformers_is_compared(monkeypatch):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", flatter)
    with pytest.raises(UnsupportedModel, match="differ by"):
        kvloom.attach(zoo.build("llama-gqa"), "full")


def test_check_false_admits_a_model_to_later_calls(tmp_path):
    model = new_model("flatter")
    kvloom.attach(model, "full", check=False)
    cache = model(**zoo.batch()).past_key_values
    cache.save(tmp_path / "cache.kv")
    assert kvloom.Cache.load(model, tmp_path / "cache.kv").get_seq_length() == 61


def test_a_refused_model_is_refused_again():
    model = new_model("flatter")
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="differ by"):
            kvloom.Cache(model, "window")


def test_training_mode_and_random_numbers_are_as_before():
    model = new_model().train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    kvloom.attach(model, "full")
    assert model.training
    assert torch.equal(torch.rand(3), expected)


def test_a_model_that_plain_transformers_cannot_run(monkeypatch):
    model = new_model()
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda x: 1 / 0)
    with pytest.raises(UnsupportedModel, match=r"without kvloom, generate.. raises ZeroDivision"):
        kvloom.attach(model, "full")
    assert untouched(model)


def test_sinks_of_layers_that_kvloom_leaves_to_transformers_are_computed():
    model = zoo.build("gpt-oss", layer_types=["sliding_attention"] * 3)
    expected = model.generate(**zoo.batch(), max_new_tokens=8, do_sample=False)
    kvloom.attach(model, "full")
    assert torch.equal(model.generate(**zoo.batch(), max_new_tokens=8, do_sample=False), expected)


def test_a_longer_sliding_window_is_not_exceeded():
    model = zoo.build("mistral-sliding")
    assert self_check.sample_batch(model)["input_ids"].shape == (2, 48)
    assert self_check.sample_batch(model)["attention_mask"].sum(dim=1).tolist() == [48, 41]
    model.config.sliding_window = 4096
    assert self_check.sample_batch(model)["input_ids"].shape == (2, 24)


def test_steps_are_compared_up_to_the_first_other_token():
    same, other = torch.eye(4)[:2], torch.eye(4)[1:3]
    spread = (same[0] - 0.25).norm().item()

    def run(*logits):
        return SimpleNamespace(logits=logits)

    first, second = run(same, 1.1 * same, same), run(same, same, other)
    assert self_check.logits_difference(first, second) == pytest.approx(2**0.5 / spread)
    late = run(same, other, 5 * same)
    assert self_check.logits_difference(run(same, same, same), late) == pytest.approx(
        2**0.5 / spread
    )
    assert self_check.logits_difference(run(same), run(same * torch.nan)) == torch.inf


def test_a_model_that_stores_nothing_in_its_cache_is_refused(monkeypatch):
    def forget(self, input_ids, attention_mask=None, **kwargs):
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}

    monkeypatch.setattr(NewLlama, "prepare_inputs_for_generation", forget)
    with pytest.raises(UnsupportedModel, match="stores no token in a cache"):
        kvloom.attach(new_model(), "full")


def test_parts_keep_their_modes():
    model = zoo.build("llama-gqa").train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    self_check.generate_sample(model, self_check.sample_batch(model))
    layer_ropes(model)
    assert [part.training for part in model.modules()] == modes
