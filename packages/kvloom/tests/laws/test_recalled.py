"""Recall: reading everything is the plain cache, nothing is lost, rows are alone, drafts undone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import probe
from backends import by_reference
from kvloom.cache.layer import LayerCache
from kvloom.errors import RecipeError
from kvloom.recall import Recall, Tier
from kvloom.recall.partial_keys import TopKFinder
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from kvloom.store import Packed, Store
from near import assert_near
from sampling import slow_except
from steps import (
    assert_follows_beams,
    assert_same_state,
    build,
    draw,
    feed,
    padded,
    state,
    unpacked,
)

LAYERS, FULL = 3, 2
PROMPT = 120


def small(
    index: str,
    tokens: int = 40,
    packed: bool | str = False,
    recent: int = 0,
    sinks: int = 4,
    tier=None,
    block: int = 20,
):
    """A recipe that recalls few tokens, with an index that takes in tokens often."""
    names = {"clusters": "clusterkv:size=8", "pages": "quest:page=8", "topk": "topk",
             "partial": "infinigen"}  # fmt: skip
    found = resolve(names[index]).recall.index
    if index == "clusters":
        found = replace(found, block=block, block_clusters=3)
    if index == "partial":
        found = replace(found, block=block)
    packing = "kivi:group=16,residual=16" if packed is True else packed or "full"
    store = resolve(packing).store
    return Recipe(
        store=store,
        recall=Recall(found, tokens, tier=tier),
        protect=Protect(sinks, recent),
        name=index,
    )


RECIPES = {
    "clusters": small("clusters"),
    "clusters, window": small("clusters", recent=9),
    "clusters, packed": small("clusters", packed=True),
    "pages": small("pages", recent=5),
    "pages, packed": small("pages", packed=True, recent=3),
    "pages, no sinks": small("pages", sinks=0),
    "pages, packed, rotated": small("pages", packed="near-lossless:group=16,residual=16", recent=3),
    "topk": small("topk", recent=5),
    "topk, packed": small("topk", packed=True),
    "partial": small("partial", recent=5),
    "partial, packed": small("partial", packed=True),
    "partial, host": small("partial", tier=Tier("host")),
    "clusters, host": small("clusters", tier=Tier("host")),
    "pages, file": small("pages", recent=3, tier=Tier("file", steps=2)),
    "clusters, packed, host": small("clusters", packed=True, block=16, tier=Tier("host")),
    "keys packed, file": replace(
        small("pages", recent=3, tier=Tier("file", steps=2)),
        store=Store(keys=Packed(3, "channel", 16, "fp8", residual=16)),
    ),
}
core = pytest.mark.parametrize("recipe", slow_except(
    RECIPES, "clusters, window", "pages, packed, rotated", "topk", "partial, packed",
    "keys packed, file",
))  # fmt: skip
STEPS = [1] * 40


def fresh(recipe: Recipe, rank: int = LAYERS - 1):
    return LayerCache(recipe.for_layer(rank, range(LAYERS)), f"layer {rank}", rank, LAYERS)


def plain(recipe: Recipe):
    return LayerCache(replace(recipe, recall=None), "layer 2", LAYERS - 1, LAYERS)


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
    assert_same_state(state(cache), state(want))
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
    cache, n = fresh(RECIPES[name]), PROMPT + len(STEPS)
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


@pytest.mark.sample
@core
@pytest.mark.parametrize("rejected", [0, 2, 5])
def test_a_rejected_draft_leaves_no_trace(recipe, rejected):
    qkv = heads(0, PROMPT + 5)
    kept = PROMPT + 5 - rejected
    drafted, never = fresh(recipe), fresh(recipe)
    for cache in (drafted, never):
        feed(cache, *(x[:, :, :PROMPT] for x in qkv))
    probe.record(drafted, True)
    got = feed(drafted, *(x[:, :, PROMPT:] for x in qkv))
    drafted.crop(rejected)
    if kept > PROMPT:
        want = feed(never, *(x[:, :, PROMPT:kept] for x in qkv), [1] * (kept - PROMPT))
        torch.testing.assert_close(got[:, :, : kept - PROMPT], want, rtol=0, atol=2e-6)
    for t in range(30):
        new = heads(t, 1)
        outputs = [feed(cache, *new) for cache in (drafted, never)]
        drafted.crop(0)  # as in assisted generation: recording all the time, settled every round
        torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
    assert probe.indexed(drafted) == probe.indexed(never) > 0


# What is packed stays packed, and partial keys stay rotated as the whole prompt was.
EXACT = [name for name in RECIPES if "packed" not in name and "partial" not in name]


@pytest.mark.sample
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("tokens", [3, 30, 110])
@pytest.mark.parametrize("pad", [0, 20])
def test_a_crop_into_the_index_is_as_if_the_tokens_had_never_been(name, tokens, pad):
    qkv = heads(0, PROMPT)
    visible = torch.arange(PROMPT + 30) >= torch.tensor([pad, 0])[:, None]
    cropped, never = fresh(RECIPES[name]), fresh(RECIPES[name])
    feed(cropped, *qkv, visible=visible[:, :PROMPT])
    cropped.crop(tokens)
    feed(never, *(x[:, :, : PROMPT - tokens] for x in qkv), visible=visible[:, : PROMPT - tokens])
    new = heads(1, 30)
    see = visible[:, : PROMPT - tokens + 30]
    outputs = [feed(cache, *new, [1] * 30, see) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@core
def test_rows_do_not_see_each_other(recipe):
    qkv = heads(0, PROMPT + len(STEPS), batch=3)
    together = feed(fresh(recipe), *qkv, [PROMPT, *STEPS])
    for row in range(3):
        alone = feed(fresh(recipe), *(x[row : row + 1] for x in qkv), [PROMPT, *STEPS])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=2e-6)


@core
def test_the_index_follows_the_beams(recipe):
    assert_follows_beams(lambda: fresh(recipe), PROMPT)


@core
@given(st.lists(st.integers(0, PROMPT - 1), min_size=2, max_size=2), st.integers(0, 99))
def test_content_of_padding_is_irrelevant(recipe, pads, seed):
    n = PROMPT + len(STEPS)
    visible, qkv = padded(pads, n), heads(seed, n)
    real = visible[:, None, :, None]
    litter = [torch.where(real, x, 6e4 * torch.sign(torch.sin(x * 99))) for x in qkv]
    outputs = [
        torch.where(real, feed(fresh(recipe), *x, [PROMPT, *STEPS], visible), 0.0)
        for x in (qkv, litter)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "name", ["clusters", "clusters, window", "topk", "partial", "clusters, host"]
)
@given(st.lists(st.integers(0, PROMPT - 30), min_size=2, max_size=2), st.integers(0, 99))
def test_padding_a_row_is_leaving_it_shorter(name, pads, seed):
    """Where a token's place does not matter, and the row has enough tokens to be indexed alone."""
    recipe, n = RECIPES[name], PROMPT + len(STEPS)
    visible, qkv = padded(pads, n), heads(seed, n)
    together = feed(fresh(recipe), *qkv, [PROMPT, *STEPS], visible)
    for i, pad in enumerate(pads):
        short = [x[i : i + 1, :, pad:] for x in qkv]
        alone = feed(fresh(recipe), *short, [PROMPT - pad, *STEPS])
        torch.testing.assert_close(together[i : i + 1, :, pad:], alone, rtol=0, atol=2e-6)


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


@by_reference
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_predicted_bytes_are_measured_bytes(recipe, batch):
    for tokens in (1, 3, 7, 20, 120, 333):
        q, k, v = heads(0, tokens, batch)
        caches = [fresh(recipe, rank) for rank in range(LAYERS)]
        for cache in caches:
            feed(cache, q, k, v)
        geometry = Geometry(LAYERS, 4, 2, k.shape[-1], k.dtype)
        held = sum(cache.nbytes for cache in caches)
        assert recipe.nbytes(tokens, geometry, batch) == held, f"{tokens} tokens"


@core
def test_the_first_layers_read_everything(recipe):
    for rank in range(LAYERS):
        cache = fresh(recipe, rank)
        feed(cache, *heads(0, PROMPT + 1), [PROMPT, 1])
        assert (probe.read(cache) == PROMPT + 1) == (rank < FULL)


@core
def test_a_layer_reset_is_a_new_one(recipe):
    used, new = fresh(recipe), fresh(recipe)
    feed(used, *heads(0, PROMPT + 30), [PROMPT, *[1] * 30])
    used.reset()
    assert used.nbytes == 0
    qkv = heads(1, PROMPT + 30)
    outputs = [feed(cache, *qkv, [PROMPT, *[1] * 30]) for cache in (used, new)]
    assert torch.equal(*outputs)


def test_alibi_counts_from_each_tokens_own_place():
    """A budget for all but one page; the page left out is one that nobody sees."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    qkv = heads(0, 101)
    recipe = small("pages", tokens=88, sinks=0)
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
        feed(fresh(RECIPES["topk"]), *heads(0, PROMPT))


def test_a_cache_reads_what_a_trace_says():
    recipe, qkv = RECIPES["pages"], heads(0, PROMPT + 1)
    cache = fresh(recipe)
    cache.observe()
    feed(cache, *qkv, [PROMPT, 1])
    assert probe.recalled(cache).shape == (2, 2, 24)
    assert probe.read(build(replace(recipe, recall=None), *qkv)) == PROMPT + 1
