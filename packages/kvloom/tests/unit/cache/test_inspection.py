"""What tools see of a layer, and what they store in it without attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import probe
from kvloom.cache import LayerCache, fill, holds_packed, layer_contents, read_nbytes
from kvloom.kernels import compile_seconds, operations_run, use_backend
from kvloom.positions import Rope
from kvloom.recipe import Protect, Recipe, resolve
from kvloom.store import (
    LayerFacts,
    Packed,
    PromptPacker,
    Store,
    random_layer_facts,
    round_trip,
)

ROPE = Rope(10000.0 ** -(torch.arange(0, 64, 2) / 64))


def prompt(tokens):
    return torch.randn(1, 4, 16, 64), *torch.randn(2, 1, 2, tokens, 64)


def test_contents_of_a_layer_that_packs():
    layer = LayerCache(Recipe(store=Store(Packed(4, "channel", 32, residual=32), None)))
    fill(layer, *prompt(100))
    contents = layer_contents(layer)
    assert contents.kept.shape == (2, 100)
    assert contents.kept.all()
    assert contents.packed["keys"].sum(dim=1).tolist() == [96, 96]
    assert not contents.packed["values"].any()
    assert holds_packed(layer)
    assert contents.budget_tokens is None
    assert read_nbytes(layer) == layer.nbytes


@pytest.mark.parametrize("name", ["h2o:tokens=40", "snapkv:tokens=40"])
def test_contents_of_a_layer_that_evicts(name):
    layer = LayerCache(resolve(name))
    layer.observe()
    fill(layer, *prompt(100))
    contents = layer_contents(layer)
    assert contents.kept.sum(dim=1).tolist() == [40, 40]
    assert contents.scores is not None
    assert contents.budget_tokens == 40
    assert not holds_packed(layer)


@pytest.mark.parametrize("block", [0, 128])
def test_contents_of_a_layer_whose_heads_compete_for_packed_tokens(block):
    spelled = f"small:fraction=0.3,recent=16,group=32,residual=32,block={block}"
    layer = LayerCache(resolve(spelled), rope=ROPE, facts=LayerFacts(rope=ROPE))
    layer.observe()
    assert not holds_packed(layer)
    fill(layer, *prompt(600))
    assert holds_packed(layer)
    contents, sinks = layer_contents(layer), 4 if block else 0  # beside the segment, or in it
    for name in ("keys", "values"):
        side = getattr(probe.tokens(layer), name)
        exact = contents.kept & ~contents.packed[name]
        assert exact.sum(dim=1).tolist() == [sinks + len(side) - side.packed_count] * 2


def test_contents_of_a_layer_with_recall():
    layer = LayerCache(resolve("quest:tokens=48,recent=0,full_layers=0"))
    layer.observe()
    q, k, v = prompt(200)
    fill(layer, q, k, v)
    before = layer_contents(layer)
    layer.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], scale=0.125)
    after = layer_contents(layer)
    assert before.indexed.any()
    assert after.recalled is not None
    assert (after.recalled[:, :200] & ~before.selectable).sum() == 0
    assert (before.parts[before.indexed] >= 0).all()
    assert read_nbytes(layer) < layer.nbytes


def test_a_round_trip_keeps_the_tokens_after_the_last_group_exact():
    _, k, v = prompt(70)
    store = resolve("kivi").store
    keys = round_trip(k, store, "keys", LayerFacts())
    assert (keys[:, :, 64:] == k[:, :, 64:]).all()
    assert 0 < (keys - k).abs().max() < 2
    assert (round_trip(v, Store(), "values", LayerFacts()) == v).all()
    error = (round_trip(v, resolve("kivi-4").store, "values", LayerFacts()) - v).norm()
    assert error < (round_trip(v, store, "values", LayerFacts()) - v).norm()


def test_random_layer_facts_has_groups_where_a_format_is_calibrated():
    store = resolve("skvq:group=32").store
    facts = random_layer_facts(store, 2, 64, ROPE)
    groups = facts.keys.group_of
    assert groups.shape == (2, 64)
    assert groups.unique(return_counts=True)[1].tolist() == [32] * 4
    plain = random_layer_facts(resolve("kivi").store, 2, 64, ROPE)
    assert plain.keys is None


def test_a_packer_packs_as_a_layer_does():
    recipe = Recipe(store=resolve("kivi").store, protect=Protect(0, 0))
    q, k, v = prompt(256)
    layer = LayerCache(recipe)
    fill(layer, q, k, v)
    packer = PromptPacker(recipe.store, recipe.protect.exact_recents, LayerFacts())
    packer.pack(k, v)
    assert packer.nbytes == layer.nbytes


def test_operations_are_counted():
    layer = LayerCache(resolve("kivi"))
    before = operations_run()
    with use_backend("ref"):
        fill(layer, *prompt(200))
    new = operations_run() - before
    assert {backend for _, backend, _ in new} == {"ref"}
    assert compile_seconds() >= 0.0


def test_a_step_reads_a_share_of_the_tokens_that_are_stored():
    """Not of those that the sequence has seen."""
    recall = resolve("quest:tokens=48,recent=0,full_layers=0")
    layer = LayerCache(replace(recall, keep=resolve("knorm:tokens=150").keep))
    q, k, v = prompt(600)
    fill(layer, q, k, v)
    layer.attend(q[:, :, -1:], k[:, :, -1:], v[:, :, -1:], scale=0.125)
    assert layer.dropped == 450
    token = k[0, :, 0].nbytes + v[0, :, 0].nbytes
    assert read_nbytes(layer) >= token * layer.tokens_read
