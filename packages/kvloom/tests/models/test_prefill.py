"""One forward pass fills the caches of a group of recipes; which recipes a group has."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import zoo

import kvloom
from backends import by_reference
from kvloom.errors import IncompatibleRecipe, NotFinite
from kvloom.hf import compat
from kvloom.hf import read_tokens as forward
from kvloom.recipe.resolve import resolve
from kvloom_lab.workload import clock, passes
from kvloom_lab.workload.passes import available_bytes, groups, prefill

IDS = torch.randint(1, 64, (2, 70), generator=torch.Generator().manual_seed(0))
FULL, H2O, KIVI, UNFIT = map(
    resolve, ("full", "h2o:tokens=20", "kivi:group=16,residual=32", "kivi:group=128")
)


def test_each_cache_holds_the_prompt_and_misfits_say_why():
    model = zoo.build("llama-gqa")
    with torch.inference_mode():
        logits, found = prefill(model, [UNFIT, H2O, FULL, KIVI], IDS)
        assert [x.recipe for x in found] == [UNFIT, H2O, FULL, KIVI]
        assert isinstance(found[0].error, IncompatibleRecipe)
        assert found[0].cache is None
        for x in found[1:]:
            alone = kvloom.Cache(model, x.recipe)
            assert torch.equal(forward(model, IDS, alone), logits)
            assert x.error is None
            assert x.cache.recipe == x.recipe
            assert x.cache.nbytes == alone.nbytes
            one, other = (forward(model, IDS[:, :1], c) for c in (alone, x.cache))
            assert torch.equal(one, other)


def test_an_error_in_storing_leaves_no_cache():
    model = zoo.build("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e8)  # too large for fp16 scales
    _, (kivi, h2o) = prefill(model, [KIVI, H2O], IDS)
    assert isinstance(kivi.error, NotFinite)
    assert kivi.cache is None
    assert h2o.cache.get_seq_length() == 70


def test_seconds_are_those_of_the_pass_and_of_storing(monkeypatch):
    ticks = count()
    monkeypatch.setattr(clock, "seconds", lambda device: next(ticks))
    model = zoo.build("llama-gqa")
    layers = model.config.num_hidden_layers
    _, (kivi, full, h2o, unfit) = prefill(model, [KIVI, FULL, H2O, UNFIT], IDS)
    assert full.seconds == 1 + 2 * layers  # the ticks between two followers' intervals
    assert kivi.seconds == h2o.seconds == full.seconds + layers
    assert unfit.seconds == 0


def test_a_recipe_that_reads_the_prompt_apart_has_its_own_seconds(monkeypatch):
    model, apart = zoo.build("bloom"), resolve("h2o:tokens=20,positions=renumbered")
    passes = []
    model.transformer.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(clock, "seconds", lambda device: len(passes))
    _, (full, found) = prefill(model, [FULL, apart], IDS)
    assert found.cache.get_seq_length() == 70
    assert len(passes) == 2
    assert full.seconds == found.seconds == 1


@by_reference
def test_the_caches_of_a_group_are_bounded(monkeypatch):
    model = zoo.build("llama-gqa")
    geometry = compat.geometry(model)
    exact = FULL.nbytes(200, geometry, 3)
    half = resolve("window:tokens=100")
    assert half.nbytes(200, geometry, 3) == pytest.approx(exact / 2, rel=0.01)
    tight = resolve("window:tokens=96")  # less than half
    large = resolve("quest:page=16")  # more than all: an index
    recipes = [FULL, *[tight] * 9, UNFIT, large, KIVI]
    monkeypatch.setattr(passes, "available_bytes", lambda device: None)
    found = groups(model, recipes, 3, 200)
    assert found == [[FULL, *[tight] * 8], [tight, UNFIT, large, KIVI]]
    monkeypatch.setattr(passes, "available_bytes", lambda device: 2 * exact)
    found = groups(model, recipes, 3, 200)
    assert found == [[FULL, tight, tight]] + [[tight, tight]] * 3 + [
        [tight, UNFIT],
        [large],
        [KIVI],
    ]
    monkeypatch.setattr(passes, "available_bytes", lambda device: 0)
    assert groups(model, [KIVI, H2O], 3, 200) == [[KIVI], [H2O]]
    small = resolve("pyramidkv:fraction=0.02,window=1")  # a prompt of 200 tokens is too short
    assert groups(model, [KIVI, small], 3, 200) == [[KIVI], [small]]


@by_reference
def test_available_memory(monkeypatch, tmp_path):
    facts = tmp_path / "meminfo"
    monkeypatch.setattr(passes, "Path", lambda path: facts)
    assert available_bytes(torch.device("cpu")) is None
    facts.write_text("MemTotal:       9 kB\nMemAvailable:   5 kB\n")
    assert available_bytes(torch.device("cpu")) == 5 * 1024
