"""Several caches step in one forward pass, as if each had stepped alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import zoo
from test_fan_out import prompt

import kvloom
import probe
from backends import by_reference
from kvloom.errors import CacheMisuse
from kvloom.hf import read_tokens as forward
from kvloom.hf.shared_pass import BatchedCaches, can_batch
from kvloom.recipe import Protect, resolve
from kvloom_lab.workload.passes import ForwardRequest, run_alone, run_batch
from near import assert_near

pytestmark = by_reference
BLOCKS = "rotated:fraction=0.5,block=32,recent=8,layers=joint,head_share=0.2"
BY_IDS = replace(
    resolve("snapkv:tokens=40,window=8,compress_after=72"),
    protect=Protect(ids=tuple(range(3, 100, 3))),
)  # the ids of later steps decide, too, until 72 tokens are seen
FORMS = (
    "full", "kivi:group=16,residual=32", "h2o:tokens=20", "snapkv:tokens=20,window=8",
    "streaming:tokens=24,positions=renumbered", "quest:tokens=24,page=4,sinks=4,recent=8",
    "snapkv:tokens=20,window=8,head_share=0.2,layers=joint", BLOCKS, BY_IDS,
)  # fmt: skip


def filled(model, rows: int = 2) -> list:
    caches = []
    ids = prompt(70, 3)["input_ids"][-rows:]
    for form in FORMS:
        caches.append(kvloom.Cache(model, form))
        with torch.no_grad():
            model(input_ids=ids, past_key_values=caches[-1])
    return caches


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gpt-neox"])
@pytest.mark.parametrize("tokens", [1, 5])
def test_each_cache_steps_as_if_alone(name, tokens):
    model = zoo.build(name)
    caches = filled(model)
    alone = copy.deepcopy(caches)
    for step in range(4):
        ids = torch.randint(3, 199, (2 * len(caches), tokens), generator=torch.manual_seed(step))
        with torch.no_grad():
            out = forward(model, ids, BatchedCaches(model, caches), all_logits=True)
            rows = zip(ids.split(2), alone, strict=True)
            each = [forward(model, x, cache, all_logits=True) for x, cache in rows]
        assert_near(out, torch.cat(each), 1e-5)
    assert [c.nbytes for c in caches] == [c.nbytes for c in alone]
    assert [c.get_seq_length() for c in caches] == [70 + 4 * tokens] * len(caches)


def test_gradients_of_a_batched_step_are_those_of_single_ones():
    model, ids = zoo.build("llama-gqa"), prompt(70, 1)["input_ids"]
    caches = [kvloom.Cache(model, "full") for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(input_ids=ids, past_key_values=cache)
    batch = BatchedCaches(model, caches)
    model(input_ids=ids[:, :1].repeat(2, 1), past_key_values=batch).logits.sum().backward()
    with pytest.raises(CacheMisuse, match="stores tokens without gradients"):
        model(input_ids=ids[:, :1], past_key_values=caches[0]).logits.sum().backward()


def test_a_failure_in_one_cache_leaves_all_as_they_were():
    model = zoo.build("llama-gqa")
    caches = filled(model, 1)
    before = [c.get_seq_length() for c in caches]
    probe.layers(caches[3])[1].unusable = "a test broke it"
    ids = torch.randint(3, 199, (len(caches), 1))
    with torch.no_grad(), pytest.raises(CacheMisuse, match="a test broke it"):
        forward(model, ids, BatchedCaches(model, caches))
    assert [c.get_seq_length() for c in caches] == before
    probe.layers(caches[3])[1].unusable = ""
    with torch.no_grad():
        forward(model, ids, BatchedCaches(model, caches))
    assert [c.get_seq_length() for c in caches] == [n + 1 for n in before]


def test_no_caches_are_refused():
    with pytest.raises(CacheMisuse, match="step each of them alone"):
        BatchedCaches(zoo.build("llama-gqa"), [])


@pytest.mark.parametrize("name", ["gpt2", "opt", "bloom", "gemma3"])
def test_models_that_need_more_than_the_caches_are_refused(name):
    model = zoo.build(name)
    form = (
        "streaming:tokens=24,positions=renumbered" if name in ("gpt2", "opt") else "h2o:tokens=20"
    )
    caches = [kvloom.Cache(model, x) for x in ("full", form)]
    for cache in caches:
        with torch.no_grad():
            model(**prompt(40, 1), past_key_values=cache)
    assert not can_batch(model, caches)
    with pytest.raises(CacheMisuse, match="step each of them alone"):
        BatchedCaches(model, caches)


def test_caches_of_other_lengths_are_refused():
    model = zoo.build("llama-gqa")
    caches = [kvloom.Cache(model, "full") for _ in range(2)]
    for tokens, cache in zip((40, 41), caches, strict=True):
        with torch.no_grad():
            model(**prompt(tokens, 1), past_key_values=cache)
    assert not can_batch(model, caches)


def test_a_cache_of_another_model_is_refused():
    model, other = zoo.build("llama-gqa"), zoo.build("llama-gqa", rms_norm_eps=1e-3)
    caches = [kvloom.Cache(x, "full") for x in (model, other)]
    for x, cache in zip((model, other), caches, strict=True):
        with torch.no_grad():
            x(**prompt(40, 1), past_key_values=cache)
    with pytest.raises(CacheMisuse, match="made for another model"):
        BatchedCaches(model, caches)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_measurements_give_what_each_gives_alone(name):
    """They make other numbers of steps, and steps of other sizes."""
    model = zoo.build(name)
    first = prompt(40, 1)["input_ids"]
    forms = FORMS if name == "llama-gqa" else FORMS[:3]

    def measure(i, form):
        cache = kvloom.Cache(model, form)
        logits = [(yield ForwardRequest(first, cache, all_logits=True))[0]]
        for k in range(4 + i):
            logits.append((yield ForwardRequest(first[:, k : k + 1 + k % 2], cache)))
        return torch.cat(logits)

    with torch.inference_mode():
        found = run_batch(model, [measure(i, form) for i, form in enumerate(forms)])
        for i, form in enumerate(forms):
            assert_near(found[i], run_alone(model, measure(i, form)), 1e-5)


def test_a_measurement_that_fails_does_not_stop_the_others():
    model = zoo.build("llama-gqa")
    first = prompt(40, 1)["input_ids"]

    def good():
        cache = kvloom.Cache(model, "full")
        yield ForwardRequest(first, cache)
        return (yield ForwardRequest(first[:, :1], cache)).shape

    def broken(caught):
        cache = kvloom.Cache(model, "full")
        yield ForwardRequest(first, cache)
        probe.layers(cache)[0].unusable = "a test broke it"
        try:
            return (yield ForwardRequest(first[:, :1], cache))
        except CacheMisuse as error:
            caught.append(error)
            raise

    def wrong():
        yield ForwardRequest(first, kvloom.Cache(model, "full"))
        raise ValueError("a mistake of its own")

    caught = []
    with torch.inference_mode():
        shape, one, other = run_batch(model, [good(), broken(caught), wrong()])
    assert shape == (1, 199)
    assert caught == [one]
    assert isinstance(other, ValueError)
    with pytest.raises(ValueError, match="a mistake of its own"):
        run_alone(model, wrong())
