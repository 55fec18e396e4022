"""Eviction from blocks: which tokens stay, by loops in float64, and what a step does not change."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
import naive_recipes as rules
import probe
from backends import by_reference
from kvloom.cache.build import coordinate
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse, NotFinite, RecipeError
from kvloom.keep import Budget, Keep, Rotated
from kvloom.positions.rope import Rope
from kvloom.recipe import Geometry, Recipe, resolve
from kvloom.store import LayerFacts
from steps import SCALE, D, assert_follows_beams, assert_same_state, draw, feed, padded

HQ, HK, LAYERS = 4, 2, 3
RECENT, BLOCK, SINKS = 8, 32, 4
ROPE = Rope(1e4 ** (-torch.arange(0, D, 2) / D))
EXACT = f"rotated:fraction=0.4,recent={RECENT},block={BLOCK}"
JOINT = f"{EXACT},head_share=0.2,layers=joint"
PACKED = f"{JOINT},fit=true,store=kivi-4"
recipes = pytest.mark.parametrize("spec", [EXACT, JOINT, PACKED])


def layers(spec: str | Recipe, count: int = LAYERS) -> list[LayerCache]:
    """Empty layers that decide together."""
    facts = LayerFacts(rope=ROPE)
    caches = [LayerCache(resolve(spec), f"layer {i}", i, count, facts=facts) for i in range(count)]
    coordinate(caches)
    return caches


def qkv(tokens: int, batch: int = 1, count: int = LAYERS, seed: int = 0) -> list:
    """Queries, keys and values of each layer; keys of some heads are longer, so that these win."""
    drawn = [draw(seed + i, tokens, batch=batch, hq=HQ, hk=HK) for i in range(count)]
    return [
        (q, k * (1 + 0.3 * torch.arange(HK)[:, None, None] + 0.2 * i), v)
        for i, (q, k, v) in enumerate(drawn)
    ]


def step(caches: list[LayerCache], tensors: list, lo: int, hi: int, visible=None) -> list:
    """Let each layer take the tokens lo to hi; return the outputs."""
    see = None if visible is None else visible[:, :hi]
    return [
        feed(cache, *(x[:, :, lo:hi] for x in each), visible=see)
        for cache, each in zip(caches, tensors, strict=True)
    ]


def run(caches: list[LayerCache], tensors: list, sizes: list[int], visible=None, at=0) -> list:
    """Take tokens in steps of these sizes; return the outputs of each step."""
    outs = []
    for size in sizes:
        outs.append(step(caches, tensors, at, at + size, visible))
        at += size
    return outs


def whole_state(caches: list[LayerCache]) -> dict:
    """All that the layers hold, by name."""
    return {f"{i}.{n}": x for i, c in enumerate(caches) for n, x in _flat(c.state()).items()}


def _flat(tree, name="") -> dict:
    if isinstance(tree, dict):
        return {k: v for n, x in tree.items() for k, v in _flat(x, f"{name}.{n}").items()}
    return {} if name.endswith((".start", ".room", ".read")) else {name: tree}


class Rule:
    """The tokens that each head of one layer holds, by loops in float64; heads do not compete."""

    def __init__(self, tensors, share: float, inv_freq) -> None:
        self.q, self.k, self.v = tensors
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
        self.offered, self.granted = self.offered + count, self.granted + granted


@by_reference
def test_the_tokens_that_stay_are_those_of_the_rule_and_attention_is_theirs():
    prompt, after, share = 100, 75, 0.4
    (cache,), ((q, k, v),) = layers(EXACT, 1), qkv(prompt + after, count=1)
    cache.observe()
    rule = Rule([x.double().numpy()[0] for x in (q, k, v)], share, ROPE.inv_freq.double().numpy())
    step([cache], [(q, k, v)], 0, prompt)
    rule.evict(prompt - SINKS - RECENT, prompt, HK * (int(share * prompt) - SINKS - RECENT))
    for n in range(prompt, prompt + after):
        ((out,),) = run([cache], [(q, k, v)], [1], at=n)
        for h in range(HK):
            tokens = rule.held(h, n + 1)
            want, _ = naive.attention(
                rule.q[None, rule.head(h), n : n + 1], rule.k[None, h : h + 1, tokens],
                rule.v[None, h : h + 1, tokens], SCALE,
            )  # fmt: skip
            np.testing.assert_allclose(out[0, rule.head(h)].double(), want[0], atol=1e-5)
        if n + 1 - rule.exact == RECENT + BLOCK:
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
    tensors, n = qkv(sum(sizes), batch=2), sum(sizes)
    visible = None if pads is None else padded(pads, n)
    caches = layers(JOINT.replace("fraction=0.4", f"fraction=1.0,sinks={sinks}"))
    outs = run(caches, tensors, sizes, visible)
    for i, each in enumerate(tensors):
        want = feed(LayerCache(resolve("full"), "full"), *each, sizes, visible)
        found = torch.cat([x[i] for x in outs], dim=2)
        real = slice(None) if visible is None else visible[:, None, :, None].expand_as(want)
        torch.testing.assert_close(found[real], want[real], rtol=0, atol=2e-6)
    assert all(cache.dropped == 0 for cache in caches)


@recipes
@given(st.integers(60, 130), st.lists(st.integers(1, BLOCK), min_size=1, max_size=8), st.booleans())
def test_the_cut_into_steps_changes_nothing(spec, prompt, sizes, pad):
    """A step of several tokens leaves the blocks that single tokens leave."""
    n = prompt + sum(sizes)
    tensors = qkv(n, batch=2)
    visible = padded([0, 5], n) if pad else None
    whole, single = layers(spec), layers(spec)
    run(whole, tensors, [prompt, *sizes], visible)
    run(single, tensors, [prompt, *[1] * sum(sizes)], visible)
    a, b = whole_state(whole), whole_state(single)
    assert a.keys() == b.keys()
    for name, x in a.items():
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            torch.testing.assert_close(x, b[name], rtol=1e-4, atol=1e-4)
        elif isinstance(x, torch.Tensor):
            assert torch.equal(x, b[name]), name


@recipes
@pytest.mark.parametrize("rejected", [0, 2, 5])
def test_crop_undoes_a_draft(spec, rejected):
    prompt, draft, rest = 100, 5, 60
    n = prompt + 25 + draft
    tensors = qkv(n + rest)
    cropped, never = layers(spec), layers(spec)
    for cache in (cropped, never):
        run(cache, tensors, [prompt, *[1] * 25])
    for cache in cropped:
        probe.record(cache, True)
    step(cropped, tensors, prompt + 25, n)
    for cache in cropped:
        cache.crop(rejected)
        probe.record(cache, False)
    run(never, tensors, [1] * (draft - rejected), at=prompt + 25)
    later = [[x[:, :, n:] for x in each] for each in tensors]
    outs = [run(cache, later, [1] * rest) for cache in (cropped, never)]
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@recipes
def test_a_crop_removes_exact_tokens_alone(spec):
    tensors = qkv(200)
    caches, never = layers(spec), layers(spec)
    run(caches, tensors, [100, *[1] * 20])
    run(never, tensors, [100, *[1] * 13])
    for cache in caches:
        cache.crop(7)
    later = [[x[:, :, 120:] for x in each] for each in tensors]
    outs = [run(cache, later, [1] * 60) for cache in (caches, never)]
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    with pytest.raises(CacheMisuse, match="reaches into"):
        caches[0].crop(90)


@pytest.mark.floor
@recipes
@pytest.mark.parametrize("prompt", [3, 11, 20])
def test_a_crop_before_the_first_block_takes_back_its_queries(spec, prompt):
    """The budget is that of the prompt as it was given."""
    tensors = qkv(200)
    caches, never = (layers(spec.replace("recent=8", "recent=30")) for _ in range(2))
    run(caches, tensors, [prompt, 1, 6])
    run(never, tensors, [prompt, 1, 3])
    for cache in caches:
        cache.crop(3)
    later = [[x[:, :, prompt + 7 :] for x in each] for each in tensors]
    outs = [run(cache, later, [1] * 90) for cache in (caches, never)]
    for a, b in zip(*outs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)
    assert all(cache._state.evictor.offered for cache in caches)  # blocks were due later


def test_no_crop_reaches_into_a_block_of_which_no_token_stays():
    (cache,), tensors = layers(EXACT, 1), qkv(20, count=1)
    run([cache], tensors, [3, 17])  # a budget of two tokens, one of them recent
    assert not cache._state.evictor.ragged.stored
    with pytest.raises(CacheMisuse, match="the newest 1 can be removed"):
        cache.crop(2)
    cache.crop(1)


def test_no_crop_takes_back_a_vote():
    caches, tensors = layers(JOINT), qkv(60)
    step(caches[:1], tensors[:1], 0, 60)
    with pytest.raises(CacheMisuse, match="cannot take back the scores"):
        caches[0].crop(1)


@recipes
def test_a_saved_state_a_copy_and_a_failed_step_continue_alike(spec):
    tensors = qkv(220, batch=2)
    caches = layers(spec)
    run(caches, tensors, [100, *[1] * 55])
    loaded = layers(spec)
    for cache, new in zip(caches, loaded, strict=True):
        new.load_state(copy.deepcopy(cache.state()))
    copied = copy.deepcopy(caches)
    before = whole_state(caches)
    with pytest.raises(NotFinite):
        step(caches, [[x * float("nan") for x in each] for each in tensors], 155, 156)
    assert_same_state(before, whole_state(caches))
    outs = [run(each, tensors, [1] * 60, at=155) for each in (caches, loaded, copied)]
    for a, b, c in zip(*outs, strict=True):
        assert all(map(torch.equal, a, b))
        assert all(map(torch.equal, a, c))


@recipes
def test_rows_follow_beams(spec):
    assert_follows_beams(lambda: layers(spec.replace("layers=joint", "layers=uniform"), 1)[0], 90)


@by_reference
@pytest.mark.parametrize("spec", [EXACT, JOINT, PACKED, f"{JOINT},sinks=0"])
@pytest.mark.parametrize("tokens", [3, 12, 40, 100, 257])
def test_predicted_bytes_are_measured_bytes(spec, tokens):
    spec += ",contribution=false"  # these layers have no norms of inputs
    caches = layers(spec, 4)
    step(caches, qkv(tokens, batch=2, count=4), 0, tokens)
    geometry = Geometry(4, HQ, HK, D, torch.float32)
    assert sum(x.nbytes for x in caches) == resolve(spec).nbytes(tokens, geometry, batch=2)


@by_reference
def test_a_long_text_is_bounded():
    """Bytes grow by the share that stays; what waits for a block does not grow."""
    caches, tensors = layers(PACKED), qkv(1200)
    run(caches, tensors, [100])
    sizes = []
    for begin in range(100, 1200, 100):
        run(caches, tensors, [1] * 100, at=begin)
        sizes.append(sum(x.nbytes for x in caches))
    packed = 2 * HK * D * 4 / 8 * 1.5 * LAYERS  # 4 bits a number, and less than half as much more
    assert sizes[-1] - sizes[0] < 1000 * packed * 0.45
    held = [len(cache._state.evictor.queries) for cache in caches]
    assert max(held) < BLOCK + RECENT


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
