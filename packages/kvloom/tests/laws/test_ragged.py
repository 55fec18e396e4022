"""Budgets per head: the heads' own tokens by a naive rule, attention in float64, exact bytes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import naive
import probe
from families import STORES, ragged
from kvloom.cache.build import build_layers, coordinate
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse
from kvloom.recipe import LayerOverride, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.store import LayerFacts
from steps import SCALE, D, assert_same_state, draw, feed, padded, state

PROMPT, LAYERS = 150, 3
HQ, HK = 4, 2
STEPS = [1, 1, 12, 1]
stores = pytest.mark.parametrize("store", STORES)


def prompts(batch=2):
    """Keys whose lengths differ from head to head and from layer to layer."""
    found = []
    for layer in range(LAYERS):
        q, k, v = draw(layer, PROMPT + sum(STEPS), batch=batch, hq=HQ, hk=HK)
        k = k * (1 + 0.1 * torch.arange(HK)[:, None, None]) * (1 + 0.05 * layer)
        found.append((q, k, v))
    return found


def filled(one: Recipe, qkv, visible=None, trace=True) -> list[LayerCache]:
    """Layers that decide together and have read a prompt."""
    caches = [LayerCache(one, f"layer {i}", i, LAYERS) for i in range(LAYERS)]
    coordinate(caches)
    for cache, each in zip(caches, qkv, strict=True):
        if trace:
            cache.observe()
        see = None if visible is None else visible[:, :PROMPT]
        feed(cache, *(x[:, :, :PROMPT] for x in each), visible=see)
    return caches


def naive_choice(scores: np.ndarray, total: int, certain: int, unit: int) -> list[list[int]]:
    """The tokens of each head by scores [H, N]: `certain` ones, then the best units of all heads.

    A unit of a head is its next best `unit` tokens; its rank is that of its middle token.
    """
    order = [sorted(range(len(s)), key=lambda i, s=s: -s[i]) for s in scores]
    bids = []
    for head, its in enumerate(order):
        for lo in range(certain, len(its) - unit + 1, unit):
            bids.append((-scores[head][its[lo + unit // 2]], head))
    won = [head for _, head in sorted(bids)[: total // unit]]
    return [sorted(its[: certain + unit * won.count(h)]) for h, its in enumerate(order)]


def expected_tokens(one: Recipe, keys: list[torch.Tensor], store: str, row: int, pad: int = 0):
    """The logical indices that each head of each layer keeps of a prompt, by loops.

    keys: of the layers that divide one budget.
    """
    unit, budget = STORES[store][1], one.keep.budget
    recent, heavy = budget.recent, budget.tokens - budget.recent
    contested = HK * int(heavy * (1 - budget.head_share) + 1e-9) // unit * unit  # of all heads
    certain = heavy - math.ceil(contested / HK)
    scores = [-k[row, :, pad : PROMPT - recent].double().norm(dim=-1).numpy() for k in keys]
    for each in scores:
        each[:, : one.protect.sinks] = np.inf
    joint = budget.layers == "joint"
    groups = [np.concatenate(scores)] if joint else scores
    heads = []
    for each in groups:
        heads += naive_choice(each, contested * len(each) // HK, certain, unit)
    newest = list(range(PROMPT - recent, PROMPT))
    return [[i + pad for i in its] + newest for its in heads]


def held(cache: LayerCache, row: int) -> list[list[int]]:
    return [sorted(i for i in head if i >= 0) for head in cache.logical()[row].tolist()]


@stores
@pytest.mark.parametrize("layers", ["uniform", "joint"])
@pytest.mark.parametrize("heads", [0.0, 0.2, 0.5])
def test_heads_keep_the_tokens_of_a_naive_rule(store, layers, heads):
    one, qkv = ragged(store, heads, layers), prompts()
    caches = filled(one, qkv)
    lengths = set()
    for row in range(2):
        want = expected_tokens(one, [k for _, k, _ in qkv], store, row)
        found = [head for cache in caches for head in held(cache, row)]
        assert found == want
        assert sum(map(len, found)) == LAYERS * HK * 80
        lengths |= set(map(len, found))
    assert len(lengths) > 1  # else the division would not be seen


def test_tokens_move_between_layers_of_equal_store_alone():
    """Layers 0 and 2 compete as they do without layer 1, and so do the heads of layer 1."""
    one, qkv = ragged("kivi", layers="joint"), prompts()
    other = ragged("balanced", layers="joint")
    mixed = replace(one, layers=(LayerOverride(1, store=other.store, protect=other.protect),))
    numbers = range(LAYERS)
    caches = build_layers(mixed, numbers, [LayerFacts() for _ in numbers])
    for cache, each in zip(caches, qkv, strict=True):
        cache.observe()
        feed(cache, *(x[:, :, :PROMPT] for x in each))
    keys = [k for _, k, _ in qkv]
    groups = (one, "kivi", [0, 2]), (other, "balanced", [1])
    for row in range(2):
        for plain, store, places in groups:
            want = expected_tokens(plain, [keys[i] for i in places], store, row)
            assert [head for i in places for head in held(caches[i], row)] == want
    lengths = [sum(map(len, held(caches[i], 0))) for i in numbers]
    assert lengths[0] != lengths[2]
    assert lengths[0] + lengths[2] == 2 * lengths[1] == 2 * HK * 80
    plain = build_layers(mixed, numbers, [LayerFacts() for _ in numbers])
    for cache, each in zip(plain, qkv, strict=True):
        feed(cache, *(x[:, :, :PROMPT] for x in each))
    geometry = Geometry(LAYERS, HQ, HK, D, torch.float32)
    assert sum(cache.nbytes for cache in plain) == mixed.nbytes(PROMPT, geometry, batch=2)


@pytest.mark.parametrize("layers", ["uniform", "joint"])
@pytest.mark.parametrize("options", [{}, {"heads": 0.0, "recent": 0, "sinks": 0}])
def test_a_step_is_masked_attention_in_float64(layers, options):
    one, qkv = ragged(layers=layers, **options), prompts()
    for cache, (q, k, v) in zip(filled(one, qkv), qkv, strict=True):
        see = np.zeros((2, HK, PROMPT), dtype=bool)
        for row in range(2):
            for head, its in enumerate(held(cache, row)):
                see[row, head, its] = True
        at = PROMPT
        for t in STEPS:
            out = feed(cache, *(x[:, :, at : at + t] for x in (q, k, v)))
            at += t
            visible = np.concatenate([see, np.ones((2, HK, at - PROMPT), dtype=bool)], axis=2)
            exact = [x[:, :, :at].double().numpy() for x in (q, k, v)]
            exact[0] = exact[0][:, :, at - t :]
            want, _ = naive.attention(*exact, SCALE, causal=True, visible=visible)
            np.testing.assert_allclose(out.numpy(), want, atol=2e-6, rtol=2e-6)
            assert probe.read(cache) == see.sum() / (2 * HK) + at - PROMPT


@pytest.mark.parametrize("store", ["balanced", "kivi"])
def test_packed_tokens_are_those_of_each_head_alone(store):
    """A head's tokens are packed as a cache of this head alone would pack them."""
    one, qkv = ragged(store, layers="joint"), prompts()
    for cache, (_, k, v) in zip(filled(one, qkv), qkv, strict=True):
        index = probe.ragged(cache).logical()
        for name, x in (("keys", k), ("values", v)):
            packed = getattr(probe.ragged(cache), name).packed
            for row, head in np.ndindex(2, HK):
                its = index[row, head][index[row, head] >= 0]
                alone = type(packed)(packed.fmt)
                alone.append(x[row, head, its][None, None])
                first, count = probe.ragged(cache).spans.bounds[row, head].tolist()
                assert len(its) == count
                found = packed.view(first, first + count).tensor()
                torch.testing.assert_close(found, alone.view().tensor(), rtol=0, atol=1e-6)
        assert probe.ragged(cache).keys.tail.view().shape[2] == 0
        assert probe.ragged(cache).values.tail.view().shape[2] == 0


@stores
def test_a_share_of_one_is_the_uniform_budget(store):
    one, qkv = ragged(store, heads=1.0), prompts()
    uniform = replace(one, keep=replace(one.keep, budget=replace(one.keep.budget, head_share=None)))
    for a, b, (q, k, v) in zip(filled(one, qkv), filled(uniform, qkv), qkv, strict=True):
        assert_same_state(state(a, "evictor.ragged"), state(b))
        assert a.nbytes == b.nbytes
        new = [x[:, :, PROMPT:] for x in (q, k, v)]
        assert torch.equal(feed(a, *new, STEPS), feed(b, *new, STEPS))


@pytest.mark.parametrize("layers", ["uniform", "joint"])
@pytest.mark.parametrize("pads", [[0, 40], [110, 3]])
def test_a_padded_row_keeps_what_it_keeps_alone(layers, pads):
    one, qkv = ragged(layers=layers), prompts()
    visible = padded(pads, PROMPT + sum(STEPS))
    caches = filled(one, qkv, visible)
    for row, pad in enumerate(pads):
        alone = [LayerCache(one, f"layer {i}", i, LAYERS) for i in range(LAYERS)]
        coordinate(alone)
        for cache, each in zip(alone, qkv, strict=True):
            feed(cache, *(x[row : row + 1, :, pad:PROMPT] for x in each))
        want = expected_tokens(one, [k for _, k, _ in qkv], "exact", row, pad)
        for i, (cache, own, each) in enumerate(zip(caches, alone, qkv, strict=True)):
            if PROMPT - pad > 80:
                assert held(cache, row) == want[HK * i : HK * (i + 1)]
            new = [x[:, :, PROMPT:] for x in each]
            together = feed(copy.deepcopy(cache), *new, STEPS, visible)[row : row + 1]
            its = feed(own, *(x[row : row + 1] for x in new), STEPS)
            torch.testing.assert_close(together, its, rtol=0, atol=2e-6)


@stores
def test_a_crop_removes_later_tokens_and_refuses_the_prompt(store):
    one, qkv = ragged(store), prompts()
    for cache, other, (q, k, v) in zip(filled(one, qkv), filled(one, qkv), qkv, strict=True):
        feed(cache, *(x[:, :, PROMPT : PROMPT + 3] for x in (q, k, v)), [1] * 3)
        held_bytes = probe.ragged(cache).nbytes
        with pytest.raises(CacheMisuse, match="reaches into"):
            cache.crop(PROMPT // 2)
        cache.crop(3)
        assert probe.ragged(cache).nbytes == held_bytes
        if store == "exact":  # a crop does not unpack what was packed meanwhile
            new = [x[:, :, PROMPT:] for x in (q, k, v)]
            outputs = [feed(c, *new, STEPS) for c in (cache, other)]
            torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
        cache.crop(cache.seen)
        assert cache.nbytes == 0


def test_a_failed_step_leaves_the_prompt_whole(monkeypatch):
    """An error while the last layer evicts undoes its step and removes its tokens."""
    one, qkv = ragged(), prompts()
    cache = LayerCache(one)
    monkeypatch.setattr(probe.tokens(cache), "note_kept", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        feed(cache, *(x[:, :, :PROMPT] for x in qkv[0]))
    assert (cache.nbytes, cache.seen) == (0, 0)
    monkeypatch.undo()
    feed(cache, *(x[:, :, :PROMPT] for x in qkv[0]))
    fresh = filled(one, qkv, trace=False)[0]
    assert cache.nbytes == fresh.nbytes
