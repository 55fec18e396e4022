"""Drafts: what was appended while recording can be undone, exactly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import probe
from families import BLOCKS, PACKED_BLOCK, close, held, layers, run, scored_recipes, tokens
from kvloom.cache.layer import LayerCache
from kvloom.errors import NotFinite
from kvloom.recipe import resolve
from steps import SOME, SOME_TOKENS, assert_same_state, build, core_recipes, draw, feed, state

seeds = st.integers(0, 999)


def drafted(
    recipe, qkv, prompt: int, draft: int, rejected: int, one_by_one=False, visible=None
) -> LayerCache:
    """Prompt, then a draft while recording, of which the newest tokens are rejected."""
    see = None if visible is None else visible[:, :prompt]
    cache = build(recipe, *(x[:, :, :prompt] for x in qkv), visible=see)
    probe.record(cache, True)
    tokens = [x[:, :, prompt : prompt + draft] for x in qkv]
    feed(cache, *tokens, [1] * draft if one_by_one else [draft], visible)
    cache.crop(rejected)
    probe.record(cache, False)
    return cache


@pytest.mark.parametrize(
    ("recipe", "copied"),
    [("h2o:tokens=40", 41), ("kivi:group=16,residual=32", 0), ("snapkv:tokens=40,window=8", 0)],
)
def test_bytes_of_a_draft_include_what_it_holds_of_the_layer_before(recipe, copied):
    """Slots are copied, with their scores and indices; other tokens are not overwritten."""
    draft = 3
    q, k, v = draw(0, 130 + draft)
    d = q.shape[3]
    cache = build(resolve(recipe), q[:, :, :130], k[:, :, :130], v[:, :, :130])
    feed(cache, *(x[:, :, 126:130] for x in (q, k, v)), [1] * 4)
    probe.record(cache, True)
    feed(cache, *(x[:, :, 130:] for x in (q, k, v)), [draft])
    inputs = 4 * draft * d * (q.shape[1] + 2 * k.shape[1])
    slots = k.shape[1] * (copied * (2 * d * 4 + 4 + 4) + (8 if copied else 0))
    held = cache.nbytes
    cache.crop(0)
    assert held - cache.nbytes == inputs + slots


@core_recipes
@given(st.integers(5, 150), st.integers(1, 40), st.integers(0, 40), st.booleans(), seeds)
def test_crop_undoes_a_draft(recipe, prompt, draft, rejected, one_by_one, seed):
    assume(rejected <= draft)
    n = prompt + draft - rejected
    q, k, v = draw(seed, prompt + draft, batch=2)
    cropped = drafted(recipe, (q, k, v), prompt, draft, rejected, one_by_one)
    never = build(recipe, *(x[:, :, :n] for x in (q, k, v)))
    assert_same_state(state(cropped), state(never))
    new = draw(seed + 1, SOME_TOKENS, batch=2)
    outputs = [feed(cache, *new, SOME) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
    assert_same_state(state(cropped), state(never))


@core_recipes
@given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 40), st.integers(0, 60), seeds)
def test_crop_undoes_a_draft_behind_padding(recipe, prompt, draft, rejected, pad, seed):
    rejected, pad = min(rejected, draft), min(pad, prompt - 1)
    n, most = prompt + draft - rejected, prompt + draft + SOME_TOKENS
    visible = torch.arange(most) >= torch.tensor([[0], [pad]])
    q, k, v = draw(seed, prompt + draft, batch=2)
    cropped = drafted(recipe, (q, k, v), prompt, draft, rejected, visible=visible)
    never = build(recipe, *(x[:, :, :n] for x in (q, k, v)), [prompt, n - prompt], visible)
    new = draw(seed + 1, SOME_TOKENS, batch=2)
    outputs = [feed(cache, *new, SOME, visible) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@core_recipes
@given(st.integers(40, 90), st.integers(30, 40), st.integers(0, 29), st.integers(1, 39), seeds)
def test_rows_may_move_within_a_draft(recipe, prompt, draft, rejected, pad, seed):
    n, order = prompt + draft - rejected, [1, 0, 1]
    visible = torch.arange(prompt + draft) >= torch.tensor([[0], [pad]])
    q, k, v = (x + 10 for x in draw(seed, prompt + draft, batch=2))
    moved = build(recipe, *(x[:, :, :prompt] for x in (q, k, v)), visible=visible[:, :prompt])
    probe.record(moved, True)
    feed(moved, *(x[:, :, prompt:] for x in (q, k, v)), visible=visible)
    moved.map(lambda x: x[order])
    moved.crop(rejected)
    tokens = (x[order, :, :n] for x in (q, k, v))
    built = build(recipe, *tokens, [prompt, n - prompt], visible[order])
    assert_same_state(state(moved), state(built))


@core_recipes
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=10), seeds)
def test_drafts_one_after_the_other_leave_no_trace(recipe, drafts, seed):
    drafts = [(draft, min(rejected, draft)) for draft, rejected in drafts]
    q, k, v = draw(seed, 30 + sum(d for d, _ in drafts))
    cache = build(recipe, *(x[:, :, :30] for x in (q, k, v)))
    kept = list(range(30))
    for draft, rejected in drafts:
        probe.record(cache, True)
        start = cache.seen
        # rejected tokens are others than those that come in their place
        part = [x[:, :, start : start + draft].clone() for x in (q, k, v)]
        for x in part:
            x[:, :, draft - rejected :] += 1
        feed(cache, *part)
        cache.crop(rejected)
        probe.record(cache, False)
        kept += range(start, start + draft - rejected)
    assert_same_state(state(cache), state(build(recipe, *(x[:, :, kept] for x in (q, k, v)))))


@core_recipes
@given(st.integers(1, 4), st.integers(1, 8), seeds)
def test_crop_undoes_a_draft_after_the_shortest_prompts(recipe, prompt, draft, seed):
    q, k, v = draw(seed, prompt + draft)
    cropped = drafted(recipe, (q, k, v), prompt, draft, draft)
    never = build(recipe, *(x[:, :, :prompt] for x in (q, k, v)))
    new = draw(seed + 1, SOME_TOKENS)
    outputs = [feed(cache, *new, SOME) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)
    assert_same_state(state(cropped), state(never))


@core_recipes
@given(
    st.integers(1, 100),
    st.lists(st.integers(1, 20), min_size=1, max_size=3),
    st.integers(0, 60),
    st.booleans(),
    seeds,
)
def test_a_draft_attends_as_without_speculation(recipe, prompt, drafts, pad, certain, seed):
    """What is dropped and packed between two tokens of a draft is what would be without it."""
    pad, n = min(pad, prompt - 1), prompt + sum(drafts)
    qkv = draw(seed, n)
    visible = (torch.arange(n) >= pad)[None] if pad else None
    drafted, alone = LayerCache(recipe), LayerCache(recipe)
    expected = feed(alone, *qkv, [prompt] + [1] * (n - prompt), visible)
    if certain:  # generate() passes the prompt and the first draft in one step
        probe.record(drafted, True)
        drafted.accepted_tokens = prompt
        sizes = [prompt + drafts[0], *drafts[1:]]
        got = feed(drafted, *qkv, sizes, visible)
    else:
        see = None if visible is None else visible[:, :prompt]
        first = feed(drafted, *(x[:, :, :prompt] for x in qkv), None, see)
        probe.record(drafted, True)
        rest = feed(drafted, *(x[:, :, prompt:] for x in qkv), drafts, visible)
        got = torch.cat([first, rest], dim=2)
    torch.testing.assert_close(got[:, :, pad:], expected[:, :, pad:], rtol=0, atol=2e-6)
    drafted.crop(0)
    assert not drafted.removable
    assert_same_state(state(drafted), state(alone))


@core_recipes
@given(st.integers(20, 60), st.integers(1, 20), seeds)
def test_a_step_that_fails_in_a_draft_changes_nothing(recipe, prompt, draft, seed):
    q, k, v = draw(seed, prompt + draft + 4)
    cache, other = (build(recipe, *(x[:, :, :prompt] for x in (q, k, v))) for _ in range(2))
    for one in (cache, other):
        probe.record(one, True)
        feed(one, *(x[:, :, prompt : prompt + draft] for x in (q, k, v)))
    bad = k[:, :, -4:].clone()
    bad[:, :, 2] = torch.nan
    with pytest.raises(NotFinite):
        feed(cache, q[:, :, -4:], bad, v[:, :, -4:])
    for one in (cache, other):
        one.crop(draft // 2)
    assert_same_state(state(cache), state(other))


@core_recipes
@given(st.integers(1, 120), st.integers(0, 3), seeds)
def test_cropping_everything_is_a_new_cache(recipe, n, more, seed):
    q, k, v = draw(seed, n)
    cache = LayerCache(recipe)
    probe.record(cache, True)
    feed(cache, q, k, v)
    cache.crop(n + more)
    assert (cache.seen, cache.nbytes) == (0, 0)
    probe.record(cache, False)
    feed(cache, q, k, v)
    assert_same_state(state(cache), state(build(recipe, q, k, v)))


@pytest.mark.sample
@scored_recipes
@pytest.mark.parametrize("rejected", [0, 2, 5])
@pytest.mark.parametrize("sizes", [[5], [120], [120, *[1] * 22]])
def test_a_rejected_draft_leaves_no_trace_where_layers_decide_together(recipe, rejected, sizes):
    if sizes == [5] and recipe.keep is not None and recipe.keep.block is not None:
        sizes = [60]  # a draft is read in one step, in which no block may be due
    if recipe == BLOCKS[PACKED_BLOCK]:  # nor any packing
        recipe = resolve(PACKED_BLOCK.replace("residual=16", "residual=48"))
    at, draft, later = sum(sizes), 5, 30
    kept = draft - rejected
    qkv, new = tokens(at + draft), tokens(2 * later, seed=1)
    cropped, never = layers(recipe), layers(recipe)
    for caches in (cropped, never):
        run(caches, qkv, sizes)
    record(cropped, True)
    got = run(cropped, qkv, [draft], at=at)
    for cache in cropped:
        cache.crop(rejected)
    record(cropped, False)
    if kept:
        close(got[..., :kept, :], run(never, qkv, [1] * kept, at=at))
    assert_same_state(held(cropped), held(never))
    close(*(run(caches, new, [1] * later) for caches in (cropped, never)))
    record(cropped, True)  # as in assisted generation: all the time, settled every round
    for at in range(later, 2 * later):
        close(*(run(caches, new, [1], at=at) for caches in (cropped, never)))
        for cache in cropped:
            cache.crop(0)


def record(caches: list[LayerCache], on: bool) -> None:
    for cache in caches:
        probe.record(cache, on)
