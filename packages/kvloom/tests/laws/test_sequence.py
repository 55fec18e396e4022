"""How a sequence is cut into steps decides nothing about what is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
import probe
from kvloom.cache.layer import LayerCache
from kvloom.recipe.resolve import resolve
from steps import (
    SCALE,
    SOME,
    SOME_TOKENS,
    D,
    assert_same_state,
    build,
    core_recipes,
    draw,
    feed,
    rows,
    state,
    unpacked,
)

UNITS = "store:bits=2,residual=128,unit=16,group=16"
seeds = st.integers(0, 999)
# steps of one token, of a few, and of more than are written after the tail before attention
sizes = st.lists(st.one_of(st.just(1), st.integers(1, 9), st.integers(60, 100)), max_size=6).map(
    lambda s: [*s, 1]
)


@core_recipes
@given(sizes, seeds)
def test_any_split_of_the_tokens_gives_the_same_cache(recipe, sizes, seed):
    q, k, v = draw(seed, sum(sizes), batch=2)
    chunks, at_once = build(recipe, q, k, v, sizes), build(recipe, q, k, v)
    assert_same_state(state(chunks), state(at_once))
    # and so the next step cannot tell them apart
    new = draw(seed + 1, 3, batch=2)
    torch.testing.assert_close(feed(chunks, *new), feed(at_once, *new), rtol=0, atol=2e-6)


@pytest.mark.sample
@core_recipes
@pytest.mark.parametrize("n", [1, 33, 130])
def test_one_token_at_a_time_gives_the_same_cache(recipe, n):
    q, k, v = draw(0, n)
    by_one, at_once = build(recipe, q, k, v, [1] * n), build(recipe, q, k, v)
    assert_same_state(state(by_one), state(at_once))


@pytest.mark.sample
@pytest.mark.parametrize("name", ["minikv:fraction=0.5", UNITS])
@pytest.mark.parametrize("sizes", [[64, 64, 22], [65, 85], [150], [127, 1, 1, 21], [1] * 150])
def test_any_split_of_a_text_behind_a_prompt_gives_the_same_cache(name, sizes):
    """The first prompt alone is packed at once."""
    caches = []
    for split in ([1] * 150, sizes):
        q, k, v = draw(0, 512 + 150)
        caches.append(build(resolve(name), q, k, v, [512, *split]))
    assert_same_state(*map(state, caches))


@core_recipes
@given(sizes, st.integers(1, 70), st.sampled_from([None, 2.0]), seeds)
def test_a_step_attends_to_what_is_stored_and_to_itself_exactly(recipe, sizes, t, softcap, seed):
    q, k, v = draw(seed, sum(sizes), batch=2, hq=4, hk=2)
    cache = build(recipe, q, k, v, sizes)
    sides = (probe.keys(cache), probe.values(cache))
    past = [unpacked(side) if len(side) else torch.zeros(2, 2, 0, D) for side in sides]
    if probe.sinks(cache) is not None:
        held = min(cache.seen, recipe.protect.sinks)
        sinks = (probe.sinks(cache).keys, probe.sinks(cache).values)
        past = [torch.cat([s[:, :, :held], x], dim=2) for s, x in zip(sinks, past, strict=True)]
    q, k, v = draw(seed + 1, t, batch=2, hq=4, hk=2)
    keys, values = (
        torch.cat(pair, dim=2).double().numpy() for pair in zip(past, (k, v), strict=True)
    )
    want, _ = naive.attention(q.double().numpy(), keys, values, SCALE, True, None, softcap)
    got = feed(cache, q, k, v, softcap=softcap)
    np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=3e-6)


@given(
    sizes,
    seeds,
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.sampled_from([None, 3.0]),
    st.lists(st.integers(0, 30), min_size=2, max_size=2),
)
def test_full_is_attention_over_everything(sizes, seed, heads, softcap, pads):
    n = sum(sizes) + 31
    q, k, v = draw(seed, n, batch=2, hq=heads[0], hk=heads[1])
    visible = torch.arange(n) >= torch.tensor(pads)[:, None]
    cache = LayerCache(resolve("full"))
    got = feed(cache, q, k, v, [31, *sizes], visible, softcap=softcap)
    want, lse = naive.attention(
        *(x.double().numpy() for x in (q, k, v)),
        SCALE,
        causal=True,
        visible=visible[:, None].numpy(),
        softcap=softcap,
    )
    seeing = lse > -np.inf
    np.testing.assert_allclose(got.numpy()[seeing], want[seeing], rtol=0, atol=3e-6)
    assert not got.isnan().any()
    assert cache.seen == n
    assert torch.equal(probe.keys(cache).tail.view()[0, :, pads[0] :], k[0, :, pads[0] :])


@core_recipes
@given(sizes, seeds)
def test_rows_of_a_batch_do_not_see_each_other(recipe, sizes, seed):
    q, k, v = draw(seed, sum(sizes), batch=3)
    together = LayerCache(recipe)
    out = feed(together, q, k, v, sizes)
    for i in range(3):
        alone = LayerCache(recipe)
        one = feed(alone, *(x[i : i + 1] for x in (q, k, v)), sizes)
        torch.testing.assert_close(out[i : i + 1], one, rtol=0, atol=2e-6)
        assert_same_state(rows(state(together), [i]), state(alone))


@core_recipes
@given(sizes, st.permutations(range(3)), st.integers(0, 2), seeds)
def test_reordering_rows_is_building_with_reordered_rows(recipe, sizes, order, twice, seed):
    order = torch.tensor([*order[:2], order[twice]])  # beams may be repeated
    q, k, v = draw(seed, sum(sizes), batch=3)
    moved = build(recipe, q, k, v, sizes)
    moved.map(lambda x: x.index_select(0, order))
    built = build(recipe, q[order], k[order], v[order], sizes)
    assert_same_state(state(moved), state(built))
    new = draw(seed + 1, SOME_TOKENS, batch=3)
    assert torch.equal(feed(moved, *new, SOME), feed(built, *new, SOME))
    assert_same_state(state(moved), state(built))


@core_recipes
@given(st.permutations(range(3)), st.lists(st.integers(0, 69), min_size=3, max_size=3), seeds)
def test_rows_of_different_padding_move_with_their_masks(recipe, order, pads, seed):
    visible = torch.arange(90 + SOME_TOKENS) >= torch.tensor(pads)[:, None]
    q, k, v = draw(seed, 90, batch=3)
    moved = build(recipe, q, k, v, [70, 20], visible)
    moved.map(lambda x: x.index_select(0, torch.tensor(order)))
    built = build(recipe, q[order], k[order], v[order], [70, 20], visible[order])
    assert_same_state(state(moved), state(built))
    new = draw(seed + 1, SOME_TOKENS, batch=3)
    outputs = [feed(cache, *new, SOME, visible[order]) for cache in (moved, built)]
    assert torch.equal(*outputs)


@core_recipes
def test_rows_can_be_multiplied_and_selected(recipe):
    q, k, v = draw(0, 90, batch=2)
    cache = build(recipe, q, k, v, [70, 20])
    cache.map(lambda x: x.repeat_interleave(2, dim=0))
    assert probe.shape(cache)[0] == 4
    cache.map(lambda x: x[torch.tensor([3])])
    alone = build(recipe, q[1:], k[1:], v[1:], [70, 20])
    assert_same_state(state(cache), state(alone))
    new = draw(1, 5)
    assert torch.equal(feed(cache, *new), feed(alone, *new))
