"""Threads that share a model, and what an interrupt between two statements leaves in it."""

from __future__ import annotations

import threading

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.hf.forward import input_norms
from kvloom.hf.implementation import FIELD, use_kvloom

pytestmark = by_reference


def in_a_thread(fn):
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()


def test_a_model_works_after_an_interrupt_between_two_statements():
    model, ids = zoo.build("llama-gqa"), zoo.batch(2, 12, (0, 0))["input_ids"]
    with torch.no_grad():
        want = model(ids).logits
    cache = kvloom.Cache(model, "full")

    class Interrupted(list):
        def __iter__(self):
            yield model.config
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), use_kvloom(Interrupted()):
        pass
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want)
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, want)
        torch.testing.assert_close(model(ids).logits, want)


def test_a_step_of_another_thread_ends_no_running_one():
    config = zoo.build("llama-gqa").config

    def step():
        with use_kvloom([config]):
            pass

    with use_kvloom([config]):
        in_a_thread(step)
        assert vars(config)[FIELD] == "kvloom"


def test_a_layer_notes_the_inputs_of_its_own_thread_alone():
    model = zoo.build("llama-gqa")
    cache = kvloom.Cache(model, "rotated:fraction=0.5,recent=8")
    ids = zoo.batch(2, 12, (0, 0))["input_ids"]
    layers = [layer for layer in cache.full_layers if layer.uses_input_norms]
    assert layers

    def read():
        with torch.no_grad():
            model(ids, use_cache=False)

    with input_norms(model, cache):
        in_a_thread(read)
        assert all(layer.norms is None for layer in layers)
        read()
        assert all(layer.norms.shape == ids.shape for layer in layers)
