"""Eviction from blocks: which tokens stay, by loops in float64, and what a step does not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
import naive_recipes as rules
from backends import by_reference
from families import BLOCK as EXACT
from families import JOINT_BLOCK as JOINT
from families import LAYERS, ROPE, layers, run, tokens
from families import PACKED_BLOCK as PACKED
from kvloom.cache.block_evictor import QUERIES
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse, RecipeError
from kvloom.keep import Budget, Keep, Rotated
from kvloom.recipe import Geometry, Recipe, resolve
from kvloom.store.packed import PackedTokens
from steps import SCALE, D, feed, padded, state

HQ, HK = 4, 2
RECENT, BLOCK, SINKS = 8, 32, 4
recipes = pytest.mark.parametrize("spec", [EXACT, JOINT, PACKED])
exact_recipes = pytest.mark.parametrize("spec", [EXACT, JOINT])


def as_waiting(q: np.ndarray) -> np.ndarray:
    """Return queries [Hq, N, D] as a layer reads those that waited for a block."""
    packed = PackedTokens(QUERIES)
    packed.append(torch.from_numpy(q[None]).float())
    return packed.view().tensor()[0].double().numpy()


class Rule:
    """The tokens that each head of one layer holds, by loops in float64; heads do not compete."""

    def __init__(self, qkv, share: float, inv_freq) -> None:
        q, self.k, self.v = qkv
        self.q, self.waiting = q.copy(), as_waiting(q)
        self.share, self.inv_freq = share, inv_freq
        self.kept: list[list[int]] = [[] for _ in range(HK)]
        self.exact, self.first_query = SINKS, 0  # the first exact token, and the first query
        self.offered = self.granted = 0

    def head(self, h: int) -> slice:
        return slice(h * HQ // HK, (h + 1) * HQ // HK)

    def held(self, h: int, end: int) -> list[int]:
        return sorted([*range(SINKS), *self.kept[h], *range(self.exact, end)])

    def evict(self, count: int, end: int, granted: int) -> None:
        """Keep so many of the oldest exact tokens of all heads, by the scores of all before end."""
        tokens, order = [*range(SINKS), *range(self.exact, end)], []
        queries = [i for i in range(self.first_query, end) if i in tokens]
        for h in range(HK):
            scores = rules.rotated(
                self.q[self.head(h)][:, queries], self.k[h][tokens], SCALE, self.inv_freq, SINKS,
                len(tokens),
            )  # fmt: skip
            scores *= np.linalg.norm(self.v[h][tokens], axis=-1)
            order.append(sorted(((-s, i) for i, s in enumerate(scores[SINKS:][:count]))))
        most = [granted // HK] * HK
        if granted % HK:  # one more token, for the head that wants it most
            most[min(range(HK), key=lambda h: order[h][most[h]])] += 1
        for h in range(HK):
            self.kept[h] += [self.exact + i for _, i in order[h][: most[h]]]
        self.exact, self.first_query = self.exact + count, end
        self.q[:, end:] = self.waiting[:, end:]  # as later queries are read
        self.offered, self.granted = self.offered + count, self.granted + granted

    def keep_whole(self, end: int) -> None:
        """Keep the exact tokens before `end` of all heads, and score nothing by their queries."""
        for kept in self.kept:
            kept += range(self.exact, end)
        self.exact = self.first_query = end


@by_reference
def test_the_tokens_that_stay_are_those_of_the_rule_and_attention_is_theirs():
    prompt, after, share = 100, 115, 0.4
    (cache,), qkv = layers(EXACT, 1), tokens(prompt + after, batch=1, count=1)
    cache.observe()
    exact = qkv[0][0].double().numpy()[0]
    rule = Rule([x.double().numpy()[0] for x in qkv[0]], share, ROPE.inv_freq.double().numpy())
    run([cache], qkv, [prompt])
    rule.evict(prompt - SINKS - RECENT, prompt, HK * (int(share * prompt) - SINKS - RECENT))
    for n in range(prompt, prompt + after):
        (out,) = run([cache], qkv, [1], at=n)
        for h in range(HK):
            kept = rule.held(h, n + 1)
            want, _ = naive.attention(
                exact[None, rule.head(h), n : n + 1], rule.k[None, h : h + 1, kept],
                rule.v[None, h : h + 1, kept], SCALE,
            )  # fmt: skip
            np.testing.assert_allclose(out[0, rule.head(h)].double(), want[0], atol=1e-5)
        if n + 1 == prompt + BLOCK + RECENT:
            rule.keep_whole(prompt + BLOCK)
        elif n + 1 - max(rule.exact, prompt + BLOCK) == RECENT + BLOCK:
            offered = rule.offered + BLOCK
            rule.evict(BLOCK, n + 1, int(HK * share * offered - rule.granted))
        for h in range(HK):
            assert [x for x in sorted(cache.logical()[0, h].tolist()) if x >= 0] == rule.held(
                h, n + 1
            )
    assert rule.offered == prompt - SINKS - RECENT + 2 * BLOCK


@pytest.mark.parametrize("sinks", [SINKS, 0])
@pytest.mark.parametrize("pads", [None, [0, 9]])
def test_attention_is_exact_where_every_token_stays(pads, sinks):
    sizes = [70, *[1] * 50, 45, 3]
    qkv, n = tokens(sum(sizes)), sum(sizes)
    visible = None if pads is None else padded(pads, n)
    caches = layers(JOINT.replace("fraction=0.4", f"fraction=1.0,sinks={sinks}"))
    outs = run(caches, qkv, sizes, visible)
    for each, found in zip(qkv, outs, strict=True):
        want = feed(LayerCache(resolve("full"), "full"), *each, sizes, visible)
        real = slice(None) if visible is None else visible[:, None, :, None].expand_as(want)
        torch.testing.assert_close(found[real], want[real], rtol=0, atol=2e-6)
    assert all(cache.dropped == 0 for cache in caches)


@recipes
@given(st.integers(60, 130), st.lists(st.integers(1, BLOCK), min_size=1, max_size=8), st.booleans())
def test_the_cut_into_steps_changes_nothing(spec, prompt, sizes, pad):
    """A step of several tokens leaves the blocks that single tokens leave."""
    n = prompt + sum(sizes)
    qkv = tokens(n)
    visible = padded([0, 5], n) if pad else None
    whole, single = layers(spec), layers(spec)
    run(whole, qkv, [prompt, *sizes], visible)
    run(single, qkv, [prompt, *[1] * sum(sizes)], visible)
    assert_alike(whole, single)


def assert_alike(whole: list[LayerCache], single: list[LayerCache]) -> None:
    """Layers hold the same, but for rounding."""
    for a, b in zip(map(state, whole), map(state, single), strict=True):
        assert a.keys() == b.keys()
        for name, x in a.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                torch.testing.assert_close(x, b[name], rtol=1e-4, atol=1e-4)
            elif isinstance(x, torch.Tensor):
                assert torch.equal(x, b[name]), name


@pytest.mark.parametrize("pads", [None, [0, 5]])
@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (PACKED, [100, *[1] * 71, 32]),
        (PACKED.replace("block=32", "block=40"), [100, 30, 33, 40, 17, 39]),
        (PACKED.replace("residual=16", "residual=64"), [100, 30, 32, 32]),
    ],
    ids=["later tokens", "no multiple of a group", "packed rarely"],
)
def test_some_cuts_change_nothing(spec, steps, pads):
    qkv, visible = tokens(sum(steps)), None if pads is None else padded(pads, sum(steps))
    whole, single = layers(spec), layers(spec)
    run(whole, qkv, steps, visible)
    run(single, qkv, [100, *[1] * sum(steps[1:])], visible)
    assert_alike(whole, single)


@recipes
def test_a_turn_longer_than_two_blocks_keeps_the_queries_of_later_tokens(spec):
    (cache,), qkv = layers(spec, 1), tokens(191, count=1)
    for steps, at in (([100, 90], 0), ([1], 190)):
        run([cache], qkv, steps, at=at)
        state = cache._state
        assert len(state.evictor.queries) == len(state.segment) - RECENT


@pytest.mark.floor
@pytest.mark.parametrize("compress_after", [0, 15])
def test_the_bytes_after_a_short_prompt_are_predicted(compress_after):
    recipe = replace(resolve(PACKED), compress_after=compress_after)
    geometry = Geometry(LAYERS, HQ, HK, D, torch.float32)
    for prompt in range(1, 90):
        caches = layers(recipe)
        run(caches, tokens(prompt, batch=1), [prompt])
        held = sum(cache.nbytes for cache in caches)
        assert held == recipe.nbytes(prompt, geometry), prompt


@exact_recipes
def test_a_crop_removes_exact_tokens_alone(spec):
    qkv = tokens(200)
    caches, never = layers(spec), layers(spec)
    run(caches, qkv, [100, *[1] * 22])
    run(never, qkv, [100, *[1] * 18])
    for cache in caches:
        cache.crop(4)
    outs = [run(each, qkv, [1] * 60, at=122) for each in (caches, never)]
    torch.testing.assert_close(*outs, rtol=0, atol=2e-5)
    with pytest.raises(CacheMisuse, match="reaches into"):
        caches[0].crop(90)


@pytest.mark.floor
@exact_recipes
@pytest.mark.parametrize("prompt", [3, 11, 20])
def test_a_crop_before_the_first_block_takes_back_its_queries(spec, prompt):
    """The budget is that of the prompt as it was given."""
    qkv = tokens(200)
    caches, never = (layers(spec.replace("recent=8", "recent=30")) for _ in range(2))
    run(caches, qkv, [prompt, 1, 6])
    run(never, qkv, [prompt, 1, 3])
    for cache in caches:
        cache.crop(3)
    outs = [run(each, qkv, [1] * 90, at=prompt + 7) for each in (caches, never)]
    torch.testing.assert_close(*outs, rtol=0, atol=2e-5)
    assert all(cache._state.evictor.offered for cache in caches)  # blocks were due later


def test_a_crop_reaches_into_no_packed_token():
    (cache,), qkv = layers(PACKED, 1), tokens(162, count=1)
    run([cache], qkv, [100, *[1] * 62])
    exact = cache._state.segment.exact_newest
    assert 0 < exact < 16
    with pytest.raises(CacheMisuse, match=f"packed tokens; the newest {exact} are still exact"):
        cache.crop(exact + 1)
    cache.crop(exact)
    assert len(cache._state.evictor.queries) == 30 - exact


def test_no_crop_reaches_into_a_block_of_which_no_token_stays():
    (cache,), qkv = layers(EXACT.replace("0.4", "0.1"), 1), tokens(20, count=1)
    run([cache], qkv, [20])  # a budget of two tokens, one of them recent
    assert not cache._state.evictor.ragged.stored
    with pytest.raises(CacheMisuse, match="the newest 1 can be removed"):
        cache.crop(2)
    cache.crop(1)


@pytest.mark.parametrize("later", [[165], [1] * 165], ids=["one step", "single tokens"])
def test_a_turn_after_a_short_first_prompt_keeps_its_share(later):
    (cache,), qkv = layers(EXACT, 1), tokens(170, count=1)
    run([cache], qkv, [5, *later])  # the block after the prompt stays whole
    evictor = cache._state.evictor
    assert evictor.offered == (170 - 5 - BLOCK - evictor.recent) // BLOCK * BLOCK
    assert evictor.granted == int(HK * 0.4 * evictor.offered)


@recipes
def test_the_block_after_the_prompt_stays_whole_and_holds_no_queries(spec):
    caches, qkv = layers(spec), tokens(180)
    run(caches, qkv, [100])
    dropped = [cache.dropped for cache in caches]
    for n in range(100, 180):
        run(caches, qkv, [1], at=n)
        for cache, before in zip(caches, dropped, strict=True):
            queries, block = cache._state.evictor.queries, 100 + BLOCK
            if n + 1 < block + RECENT + BLOCK:
                assert cache.dropped == before
                assert len(queries) == max(0, n + 1 - block)
            else:
                assert cache.dropped > before
    assert all(dropped)


def test_a_cropped_first_prompt_is_one_block():
    (cache,), qkv = layers(EXACT, 1), tokens(60, count=1)
    cache.recording = True
    run([cache], qkv, [60])
    cache.crop(3)
    assert cache._state.evictor.offered == 57 - SINKS - RECENT


def test_no_crop_takes_back_a_vote():
    caches, qkv = layers(JOINT), tokens(60)
    run(caches[:1], qkv[:1], [60])
    with pytest.raises(CacheMisuse, match="cannot take back the scores"):
        caches[0].crop(1)


@by_reference
def test_a_long_text_is_bounded():
    """Bytes grow by the share that stays; what waits for a block does not grow."""
    caches, qkv = layers(PACKED), tokens(600, batch=1)
    run(caches, qkv, [100])
    sizes = []
    for begin in range(100, 600, 100):
        run(caches, qkv, [1] * 100, at=begin)
        sizes.append(sum(x.nbytes for x in caches))
    packed = 2 * HK * D * 4 / 8 * 1.5 * LAYERS  # 4 bits a number, and less than half as much more
    assert sizes[-1] - sizes[0] < 400 * packed * 0.45
    held = [cache._state.evictor.queries for cache in caches]
    assert max(map(len, held)) < BLOCK + RECENT
    assert all(x.nbytes <= HQ * (D // 2 + 2) * (len(x) + 34) for x in held)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rotated:tokens=64,block=32", "a budget with a fraction and head_share"),
        ("kvzip:fraction=0.5,head_share=0.2", None),
        ("rotated:fraction=0.5,block=-1", "block=-1 must be a whole number"),
        ("rotated:fraction=0.5,block=32,positions=renumbered", "needs equal numbers"),
    ],
)
def test_what_does_not_combine_is_refused(spec, message):
    if message is None:
        assert resolve(spec).keep.block is None
        return
    with pytest.raises(RecipeError, match=message):
        resolve(spec)


def test_blocks_need_a_fraction_and_a_score_that_repeats_nothing():
    budget = Budget(fraction=0.5, head_share=0.2)
    with pytest.raises(RecipeError, match='give a block with when="block"'):
        Keep(budget, Rotated(), when="prompt", block=32)
    with pytest.raises(RecipeError, match="repeats the first prompt"):
        Keep(budget, resolve("kvzip").keep.scorer, when="block", block=32)
    with pytest.raises(RecipeError, match="the same fraction in all layers"):
        Keep(
            Budget(fraction=0.5, head_share=0.2, layers="pyramid"),
            Rotated(),
            when="block",
            block=32,
        )
    recipe = resolve(PACKED)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
