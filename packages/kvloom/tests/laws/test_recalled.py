"""Recall: reading everything is the plain cache, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import probe
from backends import by_reference
from families import LAYERS, RECALLED, recalling
from kvloom.cache.layer import LayerCache
from kvloom.errors import RecipeError
from kvloom.recall.partial_keys import TopKFinder
from kvloom.recipe import Recipe
from kvloom.recipe.resolve import resolve
from near import assert_near
from sampling import slow_except
from steps import (
    assert_same_state,
    build,
    draw,
    feed,
    padded,
    state,
    unpacked,
)

PROMPT = 120
core = pytest.mark.parametrize("recipe", slow_except(
    RECALLED, "clusters, window", "pages, packed, rotated", "topk", "partial, packed",
    "keys packed, file",
))  # fmt: skip
STEPS = [1] * 40


def fresh(recipe: Recipe, rank: int = LAYERS - 1):
    return LayerCache(recipe.for_layer(rank, range(LAYERS)), f"layer {rank}", rank, LAYERS)


def plain(recipe: Recipe):
    return LayerCache(replace(recipe, recall=None), "layer 1", LAYERS - 1, LAYERS)


def heads(seed: int, tokens: int, batch: int = 2):
    return draw(seed, tokens, batch=batch, hq=4, hk=2)


@pytest.mark.sample
@core
@pytest.mark.parametrize(
    "sizes", [[PROMPT, *STEPS], [70, 50, 7, *STEPS[7:]], [1] * (PROMPT + len(STEPS))]
)
def test_with_a_budget_for_all_it_is_the_plain_cache(recipe, sizes):
    qkv = heads(0, PROMPT + len(STEPS))
    roomy = replace(recipe, recall=replace(recipe.recall, tokens=1000))
    caches = fresh(roomy), plain(recipe)
    got, want = (feed(cache, *qkv, sizes) for cache in caches)
    atol = 0 if recipe.recall.tier is None else 2e-6  # a tier is a piece of its own
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


@core
def test_finding_every_token_is_the_plain_cache(recipe):
    """Through the index, which has all tokens but one unit of them to offer at the last step."""
    unit = recipe.recall.index.unit
    qkv = heads(1, PROMPT + 1)
    cache, want = fresh(recipe), plain(recipe)
    for c in (cache, want):
        feed(c, *(x[:, :, :PROMPT] for x in qkv))
    held = probe.indexed(cache)
    slots = probe.retriever(cache).finder.find(
        qkv[0][:, :, PROMPT], held, "mean", lambda: probe.oldest_keys(cache, held)
    )
    assert torch.equal(slots.sort(dim=-1).values, torch.arange(held).expand_as(slots))
    room = held - unit + recipe.protect.tokens
    probe.retriever(cache).recall = replace(probe.retriever(cache).recall, tokens=room)
    last = [x[:, :, PROMPT:] for x in qkv]
    got = feed(cache, *last)
    assert probe.read(cache) == PROMPT + 1 - unit
    # the tokens left out are those with the least weight: the outputs nearly agree
    assert_near(got, feed(want, *last), 0.2)


@core
@given(st.integers(0, 999), st.sampled_from([[PROMPT, *STEPS], [70, 50, 7, *STEPS[7:]]]))
def test_nothing_is_lost(recipe, seed, sizes):
    qkv = heads(seed, PROMPT + len(STEPS))
    cache, want = fresh(recipe), plain(recipe)
    feed(cache, *qkv, sizes)
    feed(want, *qkv, sizes)
    assert probe.trace(cache) is None
    assert probe.read(cache) < probe.read(want) == PROMPT + len(STEPS)
    if recipe.recall.tier is not None:
        probe.retriever(cache).restore(probe.tokens(cache))
    assert_same_state(state(cache, "retriever"), state(want))
    if recipe.store.exact:
        for side, x in ((probe.keys(cache), qkv[1]), (probe.values(cache), qkv[2])):
            assert torch.equal(unpacked(side), x[:, :, recipe.protect.sinks :])


@core
def test_a_step_reads_its_budget_and_what_is_not_indexed_yet(recipe):
    cache, qkv = fresh(recipe), heads(0, PROMPT + len(STEPS))
    feed(cache, *(x[:, :, :PROMPT] for x in qkv))
    protect, unit = recipe.protect, recipe.recall.index.unit
    for t in range(PROMPT, PROMPT + len(STEPS)):
        behind = t - protect.sinks - probe.indexed(cache)
        feed(cache, *(x[:, :, t : t + 1] for x in qkv))
        found = (recipe.recall.tokens - protect.tokens) // unit * unit
        assert probe.read(cache) == protect.sinks + found + behind + 1
        assert behind >= max(protect.exact_recents)


@pytest.mark.parametrize(
    "name",
    ["clusters", "clusters, window", pytest.param("clusters, packed", marks=pytest.mark.rare)],
)
@given(st.lists(st.integers(0, 100), min_size=2, max_size=2), st.integers(0, 99))
def test_the_clusters_hold_every_token_once(name, pads, seed):
    cache, n = fresh(RECALLED[name]), PROMPT + len(STEPS)
    visible = torch.arange(n) >= torch.tensor(pads)[:, None]
    feed(cache, *heads(seed, n), [PROMPT, *STEPS], visible)
    f = probe.retriever(cache).finder
    every_slot = torch.arange(f.tokens).expand_as(f.order)
    assert torch.equal(f.order.long().sort(dim=-1).values, every_slot)
    for b, h in ((0, 0), (1, 1)):
        spans = sorted(
            (s, s + n) for s, n in zip(f.start[b, h].tolist(), f.size[b, h].tolist(), strict=True)
        )
        spans = [span for span in spans if span[0] < span[1]]
        assert spans[0][0] == 0
        assert spans[-1][1] == f.tokens
        assert all(a[1] == b[0] for a, b in pairwise(spans))


# What is packed stays packed, and partial keys stay rotated as the whole prompt was.
EXACT = [name for name in RECALLED if "packed" not in name and "partial" not in name]


@pytest.mark.sample
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("tokens", [3, 30, 110])
@pytest.mark.parametrize("pad", [0, 20])
def test_a_crop_into_the_index_is_as_if_the_tokens_had_never_been(name, tokens, pad):
    qkv = heads(0, PROMPT)
    visible = torch.arange(PROMPT + 30) >= torch.tensor([pad, 0])[:, None]
    cropped, never = fresh(RECALLED[name]), fresh(RECALLED[name])
    feed(cropped, *qkv, visible=visible[:, :PROMPT])
    cropped.crop(tokens)
    feed(never, *(x[:, :, : PROMPT - tokens] for x in qkv), visible=visible[:, : PROMPT - tokens])
    new = heads(1, 30)
    see = visible[:, : PROMPT - tokens + 30]
    outputs = [feed(cache, *new, [1] * 30, see) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@core
def test_padding_between_turns_is_irrelevant(recipe):
    visible = torch.cat(
        [padded([0, 9], 60), padded([25, 0], 60), padded([0, 0], len(STEPS))], dim=1
    )
    qkv = heads(3, visible.shape[1])
    real = visible[:, None, :, None]
    litter = [torch.where(real, x, 6e4 * torch.sign(torch.sin(x * 99))) for x in qkv]
    outputs = [
        torch.where(real, feed(fresh(recipe), *x, [60, 60, *STEPS], visible), 0.0)
        for x in (qkv, litter)
    ]
    assert torch.equal(*outputs)


@core
def test_the_first_layers_read_everything(recipe):
    for rank in range(LAYERS):
        cache = fresh(recipe, rank)
        feed(cache, *heads(0, PROMPT + 1), [PROMPT, 1])
        assert (probe.read(cache) == PROMPT + 1) == (rank < LAYERS - 1)


def test_alibi_counts_from_each_tokens_own_place():
    """A budget for all but one page; the page left out is one that nobody sees."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    qkv = heads(0, 101)
    recipe = recalling("pages", tokens=88, sinks=0)
    q, k, v = qkv
    k = k.clone()
    k[:, :, 40:48] = -100 * q[:, ::2, 100:]  # scores far below all others, in both groups
    q = q[:, ::2].repeat_interleave(2, dim=1)
    outputs = []
    for cache in (fresh(recipe), plain(recipe)):
        outputs.append(feed(cache, q, k, v, [100, 1], slopes=slopes)[:, :, -1:])
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@pytest.mark.sample
@pytest.mark.parametrize("size", [1, 8, 50])
@pytest.mark.parametrize("n", [1, 2, 7, 49])
def test_fewer_tokens_than_clusters(size, n):
    """A prompt within a cluster waits; a row with fewer real tokens than clusters has fewer."""
    recipe = resolve(f"clusterkv:tokens=6,size={size},sinks=2,full_layers=0")
    n, later = n + 2, 60
    cache, want = fresh(recipe), plain(recipe)
    visible = padded([0, n - 1], n + later)
    qkv = heads(0, n + later)
    outputs = [feed(c, *qkv, [n, *[1] * later], visible) for c in (cache, want)]
    assert torch.isfinite(outputs[0][0]).all()
    torch.testing.assert_close(outputs[0][:, :, :n], outputs[1][:, :, :n], rtol=0, atol=2e-6)
    assert probe.indexed(cache) == (0 if n - 2 + later < size else max(n - 2, size))
    left_out = max(0, probe.indexed(cache) - 4)
    assert probe.read(cache) == n + later - left_out


@by_reference
def test_an_index_that_does_not_count_its_keys_is_refused(monkeypatch):
    monkeypatch.setattr(TopKFinder, "extend", lambda self, keys, nonpadding: None)
    with pytest.raises(RecipeError, match="index 'topk' was given 111 keys and counted 0; add"):
        feed(fresh(RECALLED["topk"]), *heads(0, PROMPT))


def test_a_cache_reads_what_a_trace_says():
    recipe, qkv = RECALLED["pages"], heads(0, PROMPT + 1)
    cache = fresh(recipe)
    cache.observe()
    feed(cache, *qkv, [PROMPT, 1])
    assert probe.recalled(cache).shape == (2, 2, 24)
    assert probe.read(build(replace(recipe, recall=None), *qkv)) == PROMPT + 1
