"""A step that fails or is interrupted, anywhere, leaves the cache as it was before the step."""

from __future__ import annotations

import copy
import threading
from contextlib import contextmanager
from itertools import count, pairwise

import pytest
import torch
import zoo
from test_saved import FORMS, IDS, PROMPT, SAVED, llama, step

import kvloom
import probe
from kvloom.errors import CacheMisuse
from kvloom.recipe.resolve import resolve
from sampling import slow_except
from stopping import Stop, StopAt

__all__ = ["llama"]
NEVER = 1 << 40
undone_forms = pytest.mark.parametrize(
    "form",
    slow_except(
        FORMS,
        "clusterkv:tokens=40,size=8,sinks=4,full_layers=1,tier=host,steps=2,query_heads=each",
        "h2o:shared=true,layers=variance",
        "h2o:tokens=40,limit=120,positions=renumbered",
        "kivi:group=16,residual=32,rotate=true",
        "skvq:group=16,window=8,sinks=2,outliers=4",
        "small:fraction=0.8,group=16,residual=16,recent=8,chunk=50",
        "snapkv:tokens=40,window=8,head_share=0.2",
        "quest:tokens=48,page=4,sinks=4,recent=8,full_layers=1",
        "full:",
    ),
)
"""By default, one form of every part of a cache that a step changes."""
KIVI = "kivi:group=32,residual=32"  # other tests compile its kernel, too


def run(model, cache, lo: int, hi: int, number: int, error=Stop) -> int:
    """Run a step and stop at the torch operation of this number; how many there were."""
    ids, mask = IDS["input_ids"][:, lo:hi], IDS["attention_mask"][:, :hi]
    with torch.no_grad(), StopAt(number, error) as mode:
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    return number - mode.left


@contextmanager
def stopping(module):
    """Raise `Stop` when the module has been called."""

    def stop(*args):
        raise Stop

    hook = module.register_forward_hook(stop)
    with pytest.raises(Stop):
        yield
    hook.remove()


def functions(model, cache, lo: int, hi: int) -> int:
    """How many of torch's functions a step runs once its kernels are bound."""
    twin = copy.deepcopy(cache)
    with stopping(model.get_output_embeddings()):
        step(model, twin, lo, hi)
    return run(model, twin, lo, hi, NEVER)


def places(model) -> list:
    """Modules that end inside a layer, between layers and after the last one."""
    layers = model.model.layers
    inside = [layer.self_attn.o_proj for layer in layers]
    return [*inside, *[layer.mlp for layer in layers], model.model.norm, model.lm_head]


def filled(llama, form: str):
    """A model and a cache of 180 tokens, ten of them decoded."""
    model, calibration = llama
    if resolve(form).store.calibrated:
        form = f"{form},calibration={calibration}"
    cache = kvloom.Cache(model, form)
    step(model, cache, 0, PROMPT)
    for at in range(PROMPT, SAVED):
        step(model, cache, at, at + 1)
    return model, cache


def go_on(model, cache, begin: int) -> torch.Tensor:
    """The logits of some steps from token `begin` on."""
    cuts = [begin, begin + 1, begin + 2, begin + 14, begin + 15]
    return torch.cat([step(model, cache, lo, hi) for lo, hi in pairwise(cuts)], 1)


@pytest.mark.sample
@undone_forms
@pytest.mark.parametrize("tokens", [1, 18])
def test_a_step_that_stops_anywhere_is_undone(llama, form, tokens):
    model, cache = filled(llama, form)
    want = go_on(model, copy.deepcopy(cache), SAVED)
    for module in places(model):
        with stopping(module):
            step(model, cache, SAVED, SAVED + tokens)
        assert [layer.get_seq_length() for layer in cache.layers] == [SAVED] * 3
    stops = functions(model, cache, SAVED, SAVED + tokens)
    assert stops > 100
    for number in range(tokens % 47, stops, 47):
        with pytest.raises(Stop):
            run(model, cache, SAVED, SAVED + tokens, number)
        assert [layer.get_seq_length() for layer in cache.layers] == [SAVED] * 3
    assert torch.equal(go_on(model, cache, SAVED), want)


@undone_forms
def test_a_prompt_that_stops_leaves_the_cache_empty(llama, form):
    model, calibration = llama
    if resolve(form).store.calibrated:
        form = f"{form},calibration={calibration}"
    want = step(model, kvloom.Cache(model, form), 0, PROMPT)
    cache = kvloom.Cache(model, form)
    for module in places(model):
        with stopping(module):
            step(model, cache, 0, PROMPT)
        assert (cache.nbytes, cache.get_seq_length()) == (0, 0)
    assert torch.equal(step(model, cache, 0, PROMPT), want)


def test_a_prompt_that_stops_before_attention_leaves_nothing_for_the_next_call(llama):
    model, _ = llama
    cache = kvloom.Cache(model, "rotated:fraction=0.5,recent=8")
    layer = cache.full_layers[1]
    with stopping(model.model.layers[1].self_attn.q_proj):
        step(model, cache, 0, PROMPT)
    assert (layer.awaits_attention, layer.norms, layer.ids, layer.repeated) == (False, *[None] * 3)


@pytest.mark.parametrize("name", slow_except(
    ("gemma2", "gemma3", "gpt-oss", "gemma4-shared", "gpt2", "opt", "bloom", "falcon-gqa", "gptj"),
    "gemma3", "gpt-oss", "gemma4-shared", "gpt2", "bloom",
))  # fmt: skip
def test_layers_of_other_models_are_undone_too(name):
    model = zoo.build(name)
    implementation = model.config._attn_implementation
    cache = kvloom.Cache(model, "h2o:tokens=24")
    routed = model.config._attn_implementation
    step(model, cache, 0, 61)
    want = go_on(model, copy.deepcopy(cache), 61)
    for number in range(0, functions(model, cache, 61, 62), 7):
        with pytest.raises(Stop):
            run(model, cache, 61, 62, number)
        holding = [layer for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
        assert {layer.get_seq_length() for layer in holding} == {61}
        assert model.config._attn_implementation == routed
    assert torch.equal(go_on(model, cache, 61), want)
    kvloom.detach(model)
    assert model.config._attn_implementation == implementation


def test_what_cannot_be_undone_makes_the_cache_unusable(llama, monkeypatch, tmp_path):
    model, cache = filled(llama, "full")
    monkeypatch.setattr(cache.full_layers[1], "roll_back", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, cache, SAVED, SAVED + 1, 200)
    monkeypatch.undo()
    for use in (
        lambda: step(model, cache, SAVED, SAVED + 1),
        lambda: cache.crop(-1),
        lambda: cache.save(tmp_path / "x.kv"),
        lambda: copy.deepcopy(cache).crop(-1),
    ):
        with pytest.raises(
            CacheMisuse, match="cannot be used any more: a step failed, and undoing"
        ):
            use()
    cache.reset()
    step(model, cache, 0, PROMPT)


def test_a_reordering_that_stops_midway_makes_the_cache_unusable(llama, monkeypatch):
    model, cache = filled(llama, "full")
    monkeypatch.setattr(probe.layers(cache)[1], "map", lambda fn: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.reorder_cache(torch.tensor([0, 0, 1]))
    with pytest.raises(CacheMisuse, match=r"reorder_cache failed midway; call cache\.reset"):
        step(model, cache, SAVED, SAVED + 1)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_lack_of_memory_is_told_as_such_wherever_it_comes(llama, error):
    """The cache is as before, even where the last operation of the call fails."""
    model, cache = filled(llama, "full")
    for number in count():
        try:
            run(model, cache, SAVED, SAVED + 1, number, error)
        except error:
            assert cache.get_seq_length() == SAVED
        else:
            break
    assert number > 100


def test_sliding_windows_that_cannot_be_released_undo_the_prompt(monkeypatch):
    def release(layers):
        raise MemoryError

    model = zoo.build("gemma3")
    cache = kvloom.Cache(model, "h2o:tokens=24")
    with monkeypatch.context() as patch:
        patch.setattr("kvloom.hf.stock.release", release)
        with pytest.raises(MemoryError):
            step(model, cache, 0, 61)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    want = step(model, kvloom.Cache(model, "h2o:tokens=24"), 0, 61)
    assert torch.equal(step(model, cache, 0, 61), want)


def test_nothing_is_kept_for_undoing_after_a_step(llama):
    _, cache = filled(llama, KIVI)
    for layer in probe.layers(cache):
        assert layer.undo is None
        assert all(getattr(part, "before", None) is None for part in layer.step_parts().parts)


def test_caches_of_one_model_step_in_two_threads_at_once(llama):
    """One step ends while another runs, which still reaches kvloom; plain calls work meanwhile."""
    model, cache = filled(llama, "full")
    want = go_on(model, copy.deepcopy(cache), SAVED)
    whole = {name: x[:, :PROMPT] for name, x in IDS.items()}
    plain = model(**whole, use_cache=False).logits
    inside, may_end, found = threading.Event(), threading.Event(), []

    def wait(*args):
        if threading.current_thread() is thread and not inside.is_set():
            inside.set()
            assert may_end.wait(60)

    hook = model.model.layers[0].mlp.register_forward_hook(wait)
    thread = threading.Thread(target=lambda: found.append(go_on(model, cache, SAVED)))
    thread.start()
    assert inside.wait(60)
    step(model, kvloom.Cache(model, "full"), 0, PROMPT)
    torch.testing.assert_close(model(**whole, use_cache=False).logits, plain)
    may_end.set()
    thread.join()
    hook.remove()
    torch.testing.assert_close(found[0], want)


def test_a_second_thread_is_refused_and_changes_nothing(llama):
    model, cache = filled(llama, KIVI)
    want = go_on(model, copy.deepcopy(cache), SAVED)
    inside, may_end, errors = threading.Event(), threading.Event(), []

    def wait(*args):
        inside.set()
        assert may_end.wait(60)

    def first():
        hook = model.model.layers[1].mlp.register_forward_hook(wait)
        try:
            errors.append(step(model, cache, SAVED, SAVED + 1))
        finally:
            hook.remove()

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    for use in (
        lambda: step(model, cache, SAVED, SAVED + 1),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0, 1, 2])),
        lambda: cache.save("nowhere/x.kv"),
    ):
        with pytest.raises(CacheMisuse, match="in the middle of a step, perhaps in another thread"):
            use()
    other = copy.deepcopy(kvloom.Cache(model, KIVI))
    may_end.set()
    step(model, other, 0, PROMPT)  # another cache of the same model may be used meanwhile
    thread.join()
    rest = [step(model, cache, lo, hi) for lo, hi in ((181, 182), (182, 194), (194, 195))]
    # a new thread has other settings of OpenMP, and so other sums
    torch.testing.assert_close(torch.cat([errors[0], *rest], dim=1), want, rtol=1e-5, atol=1e-5)
