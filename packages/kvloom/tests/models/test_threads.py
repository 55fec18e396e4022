"""Threads that share a model, and what an interrupt between two statements leaves in it."""

from __future__ import annotations

import linecache
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.errors import CacheMisuse
from kvloom.hf import routing
from kvloom.hf.forward import input_norms
from kvloom.hf.implementation import FIELD, use_kvloom
from kvloom.recipe import resolve

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


CHANGING = [str(Path(routing.__file__).with_name(f"{name}.py"))
            for name in ("adapters", "forward", "implementation", "routing")]  # fmt: skip
"""Files of kvloom that change a model."""


def interrupted(fn, number: int) -> bool:
    """Interrupt a function before its statement `number` in these files; whether it has so many."""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        code = frame.f_code
        if event == "line":
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            left -= not line.startswith("with ")  # it comes again as the block ends, uninterrupted
            if left < 0:
                raise KeyboardInterrupt
        return trace if code.co_filename in CHANGING else None

    sys.settrace(trace)
    try:
        fn()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def attributes(model) -> dict:
    """What `attach` and a step may change: attributes of modules, and of configs."""
    configs = {id(x): x for m in model.modules() if (x := getattr(m, "config", None)) is not None}
    things = [*model.modules(), *configs.values(), model.generation_config]
    return {(i, name): x for i, thing in enumerate(things) for name, x in vars(thing).items()}


@pytest.mark.parametrize("name", ["llama-gqa", "mpt"])
@pytest.mark.parametrize("at", ["attach", "call", "detach"])
def test_detach_restores_a_model_after_an_interrupt_anywhere(name, at):
    """MPT has an adapter, and a config that names use_cache=False."""
    model, ids = zoo.build(name), zoo.batch(1, 5, (0,))["input_ids"]
    model.config.use_cache = name != "mpt"
    attach, detach = partial(kvloom.attach, model, "full"), partial(kvloom.detach, model)
    attach()
    detach()
    before, number = attributes(model), int(name == "mpt")
    steps = {"attach": attach, "call": partial(model, ids), "detach": detach}
    with torch.no_grad():
        while True:
            if at != "attach":
                attach()
            stopped = interrupted(steps[at], number)
            if stopped and number % 4 > 1:  # what was stopped can begin again
                attach()
                model(ids)
            if hasattr(model, "_kvloom"):
                detach()
            assert attributes(model) == before, number
            if not stopped:
                break
            number += 2
    assert number > 15


def test_a_step_of_another_thread_ends_no_running_one():
    config = zoo.build("llama-gqa").config

    def step():
        with use_kvloom([config]):
            pass

    with use_kvloom([config]):
        in_a_thread(step)
        assert vars(config)[FIELD] == "kvloom"


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_call_of_another_thread_survives_the_end_of_a_step(implementation):
    model, prompt = zoo.build("llama-gqa"), zoo.batch(2, 30, (0, 9))
    model.set_attn_implementation(implementation)
    kvloom.attach(model, "full")
    within, ended, got = threading.Event(), threading.Event(), []

    def wait(*_):
        within.set()
        ended.wait()

    def read():
        with torch.no_grad():
            got.append(model(**prompt, use_cache=False).logits)

    with torch.no_grad():
        want = model(**prompt, use_cache=False).logits
    hook = model.model.layers[0].register_forward_pre_hook(wait)  # masks are made before
    thread = threading.Thread(target=read)
    with use_kvloom([model.config]):
        thread.start()
        within.wait()
    ended.set()
    thread.join()
    hook.remove()
    assert torch.equal(got[0], want)


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


def test_a_prompt_is_repeated_as_its_own_thread_gave_it():
    """Another thread's prompt of as many tokens runs before the first has reached its decoder."""
    model = zoo.build("llama-gqa")
    prompts = [torch.randint(3, 190, (1, 124)) for _ in range(2)]
    mine, other = map(model.get_input_embeddings(), prompts)
    ids, threads = torch.randint(3, 190, (1, 8)), set()

    def answer(embeds):
        cache = kvloom.Cache(model, "kvzip:tokens=40")
        with torch.no_grad():
            model(inputs_embeds=embeds.detach(), past_key_values=cache)
            return model(ids, past_key_values=cache).logits

    def other_first(*_):
        if not threads:
            threads.add(threading.get_ident())
            in_a_thread(lambda: answer(other))

    want = answer(mine)
    with kvloom.attach(model, "full"):
        hook = model.model.register_forward_pre_hook(other_first)
        assert torch.equal(answer(mine), want)
        hook.remove()


def test_a_second_thread_is_refused_and_the_first_goes_on():
    model, ids = zoo.build("llama-gqa"), zoo.batch(1, 40, (0,))["input_ids"]
    recipe = resolve("snapkv:tokens=20,window=8")
    cache = kvloom.Cache(model, replace(recipe, protect=replace(recipe.protect, ids=(5,))))
    refused = []

    def second():
        for use in (lambda: model(ids, past_key_values=cache), cache.reset):
            with pytest.raises(CacheMisuse, match="in the middle of a step"):
                use()
            refused.append(use)

    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: in_a_thread(second))
    with torch.no_grad():
        model(ids, past_key_values=cache)
    hook.remove()
    assert len(refused) == 2
    assert cache.get_seq_length() == 40
    assert cache.token_hash.problem(ids) == ""
