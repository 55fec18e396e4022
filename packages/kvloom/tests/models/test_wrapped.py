"""Models that are pickled, copied, sent to another process, compiled, or wrapped by peft."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import warnings

import pytest
import torch
import zoo

import kvloom
from backends import by_reference

pytestmark = by_reference  # none of this depends on kernels

H2O = "h2o:tokens=24"
GREEDY = {"max_new_tokens": 8, "do_sample": False}


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "opt", "bloom", "falcon-alibi", "gptj"])
@pytest.mark.parametrize("way", [pickled, saved, copy.deepcopy])
def test_a_copy_of_an_attached_model_is_attached(name, way):
    model = zoo.build(name)
    plain = model.generate(**zoo.batch(), **GREEDY)
    kvloom.attach(model, H2O)
    want = model.generate(**zoo.batch(), **GREEDY)
    if way is copy.deepcopy:
        twin = way(model)
    else:
        with pytest.warns(UserWarning, match=r"unpickled model has recipe 'h2o:.* attached, as it"):
            twin = way(model)
    kvloom.detach(model)
    assert torch.equal(twin.generate(**zoo.batch(), **GREEDY), want)
    assert type(twin(**zoo.batch()).past_key_values) is kvloom.Cache
    kvloom.detach(twin)
    for each in (model, twin):
        assert torch.equal(each.generate(**zoo.batch(), **GREEDY), plain)
        assert "forward" not in vars(each)


def test_a_model_that_only_has_a_cache_is_unpickled_without_a_word():
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, H2O)
    twin = pickled(model)
    for each in (model, twin):
        each(**zoo.batch(), past_key_values=copy.deepcopy(cache))


def _generate(model, queue) -> None:
    queue.put(model.generate(**zoo.batch(), **GREEDY).tolist())


@pytest.mark.slow
def test_a_spawned_process_gets_an_attached_model():
    model = zoo.build("llama-gqa")
    kvloom.attach(model, H2O)
    want = model.generate(**zoo.batch(), **GREEDY).tolist()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_generate, args=(model, queue))
    process.start()
    assert queue.get(timeout=300) == want
    process.join()
    assert process.exitcode == 0


class Adapted:
    """What peft makes of a model, as far as kvloom looks: it calls the forward of the model."""

    def __init__(self, model, kind: str = "LORA") -> None:
        self.base_model, self.kind = model, kind

    @property
    def active_peft_config(self):
        return type("Config", (), {"peft_type": self.kind})

    def get_base_model(self):
        return self.base_model

    def __call__(self, *args, **kwargs):
        return self.base_model.forward(*args, **kwargs)


def test_a_model_in_an_adapter_is_attached():
    model = Adapted(zoo.build("llama-gqa"))
    assert "3 of 3 layers" in str(kvloom.attach(model, H2O))
    cache = model(**zoo.batch()).past_key_values
    assert (type(cache), cache.get_seq_length()) == (kvloom.Cache, 61)
    cache = kvloom.Cache(model, "full")
    model(**zoo.batch(), past_key_values=cache)
    kvloom.detach(model)
    assert "forward" not in vars(model.base_model)


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "CARTRIDGE"])
def test_prefix_tuning_is_refused_by_name(kind):
    model = Adapted(zoo.build("llama-gqa"), kind)
    with pytest.raises(kvloom.errors.UnsupportedModel, match=r"Adapted .*prefix tuning"):
        kvloom.attach(model, H2O)


@pytest.mark.parametrize("compiled", ["wrapper", "method", "forward before", "forward after"])
def test_a_compiled_model_runs_its_steps_uncompiled(compiled):
    """What torch would compile is run as it is: what matters is that kvloom's cache is used."""
    model = zoo.build("llama-gqa")
    kvloom.attach(model, H2O)
    want = model.generate(**zoo.batch(), **GREEDY)
    given = model
    if compiled == "wrapper":
        given = torch.compile(model, backend="eager")
    elif compiled == "method":
        model.compile(backend="eager")
    elif compiled == "forward after":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        kvloom.detach(model)
        model.forward = torch.compile(model.forward, backend="eager")
        kvloom.attach(model, H2O)
    if compiled == "wrapper":
        kvloom.detach(given)
        kvloom.attach(given, H2O)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            cache = given(**zoo.batch()).past_key_values
        assert (type(cache), cache.get_seq_length()) == (kvloom.Cache, 61)
        assert torch.equal(given.generate(**zoo.batch(), **GREEDY), want)
    torch._dynamo.reset()


def test_masks_that_a_hook_moves_to_the_device_of_a_layer():
    """accelerate moves the arguments of layers, where a model is on several devices."""
    model, batch = zoo.build("llama-gqa"), zoo.batch()
    with torch.no_grad():
        want = model(**batch).logits

    def move(module, args, kwargs):
        return args, {**kwargs, "attention_mask": kwargs["attention_mask"].to("meta")}

    for layer in model.model.layers:
        layer.register_forward_pre_hook(move, with_kwargs=True)
    with torch.no_grad():
        got = model(**batch, past_key_values=kvloom.Cache(model, "full")).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
