"""Keys packed as they were before RoPE: turned back, packed, and turned to where they stood."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
import probe
from backends import by_reference
from kvloom.cache.layer import LayerCache
from kvloom.errors import CacheMisuse, NotFinite, RecipeError
from kvloom.keep import Budget, Keep, Mass
from kvloom.positions.rope import Rope
from kvloom.recipe import Protect, Recipe
from kvloom.recipe.geometry import Geometry
from kvloom.store import LayerFacts, Packed, Store
from near import assert_near
from steps import SOME, SOME_TOKENS, D, draw, feed

pytestmark = by_reference  # their formats take long to compile
ROPES = {
    "whole": Rope(10000.0 ** -(torch.arange(0, D, 2) / D)),
    "partial": Rope(100.0 ** -(torch.arange(0, 8, 2) / 8)),
    "interleaved": Rope(500.0 ** -(torch.arange(0, D, 2) / D), interleaved=True),
}
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
LAYER = Packed(2, "token", 32, "fp32", pre_rope=True, span="layer", clip=0.9)
HEAD = Packed(3, "token", 16, "fp32", pre_rope=True)
CHANNEL = Packed(2, "channel", 16, "fp32", residual=32, pre_rope=True)
seeds = st.integers(0, 99)


def turned(x: np.ndarray, rope: Rope, by: np.ndarray) -> np.ndarray:
    """x [..., N, D] turned pair by pair in float64; by: [N]."""
    out, freq = x.copy(), rope.inv_freq.double().numpy()
    for i, f in enumerate(freq):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + len(freq))
        cos, sin = np.cos(by * f), np.sin(by * f)
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def cached(fmt, rope, sinks=0, recent=0, keep=None) -> LayerCache:
    recipe = Recipe(keep=keep, store=Store(keys=fmt), protect=Protect(sinks, recent))
    return LayerCache(recipe, "layer 0", 0, 1, facts=LayerFacts(rope=rope))


def stored_keys(cache: LayerCache) -> torch.Tensor:
    """Packed keys as attention sees them."""
    body = probe.tokens(cache)
    return body.unpacked_keys(0, body.keys.packed_count)


@every_rope
@pytest.mark.parametrize("fmt", [LAYER, HEAD], ids=["layer", "head"])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 7), seeds)
def test_stored_keys_are_turned_back_quantized_and_turned_again(rope, fmt, sizes, sinks, seed):
    n = sum(sizes)
    q, k, v = draw(seed, n, hq=4, hk=2)
    cache = cached(fmt, rope, sinks, recent=3)
    feed(cache, q, k, v, sizes)
    packed = max(0, n - sinks - 3)
    assert probe.keys(cache).packed_count == packed
    if not packed:
        return
    exact = k[0, :, sinks : sinks + packed].double().numpy()
    at = np.arange(sinks, sinks + packed)
    raw = turned(exact, rope, -at)
    channel = np.arange(2 * D).reshape(2, D)
    group_of, clip = (channel // 32, 0.9) if fmt is LAYER else (channel // 16, 1.0)
    want, scale, _ = naive.mapped(raw, fmt.bits, group_of, "fp32", np.float32(clip))
    got = turned(stored_keys(cache)[0].double().numpy(), rope, -at)
    off = np.abs(got - want)
    assert (off <= scale.max() * (1 + 1e-4)).all()  # a tie may go either way: one step
    assert (off > 1e-4).mean() < 0.01


@every_rope
def test_keys_before_rope_do_not_depend_on_where_a_text_stands(rope):
    """The same raw keys 1000 positions on: the same codes."""
    _, raw, v = draw(0, 40, hk=2)
    caches = []
    for begin in (0, 1000):
        k = rope.rotate(raw, torch.arange(begin, begin + 40).view(1, 1, -1))
        cache = cached(LAYER, rope)
        probe.tokens(cache).first = begin
        probe.tokens(cache).extend(k, v, 0)
        caches.append(cache)
    a, b = (probe.keys(c).packed for c in caches)
    assert (a.live.codes == b.live.codes).float().mean() > 0.99
    torch.testing.assert_close(a.live.scale, b.live.scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fmt", [LAYER, HEAD, CHANNEL], ids=["layer", "head", "channel"])
@given(st.lists(st.integers(0, 60), min_size=2, max_size=2), seeds)
def test_rows_of_a_padded_batch_store_what_they_store_alone(fmt, pads, seed):
    """Padding moves a row's slots, not its positions: the model rotates by position."""
    rope, n = ROPES["whole"], 64
    if fmt is CHANNEL:
        pads = [pad // 16 * 16 for pad in pads]  # groups of tokens must be the same ones
    _, raw, v = draw(seed, n, batch=2, hk=2)
    visible = torch.arange(n) >= torch.tensor(pads)[:, None]
    at = torch.arange(n) - torch.tensor(pads)[:, None]
    k = rope.rotate(raw, at[:, None])
    batch = cached(fmt, rope)
    feed(batch, torch.zeros(2, 2, n, D), k, v, [40, 24], visible)
    for row, pad in enumerate(pads):
        alone = cached(fmt, rope)
        part = slice(row, row + 1), slice(None), slice(pad, None)
        feed(alone, torch.zeros(1, 2, n - pad, D), k[part], v[part])
        length = probe.keys(alone).packed_count
        if length == 0:
            continue
        torch.testing.assert_close(
            stored_keys(batch)[row, :, pad : pad + length], stored_keys(alone)[0], rtol=0, atol=1e-5
        )


@every_rope
@pytest.mark.parametrize("fmt", [LAYER, CHANNEL], ids=["layer", "channel"])
@given(st.integers(30, 90), st.integers(1, 30), st.integers(0, 30), st.integers(0, 60), seeds)
def test_crop_rows_and_chunks_know_nothing_of_it(rope, fmt, prompt, draft, rejected, pad, seed):
    rejected, pad = min(rejected, draft), min(pad, prompt - 1)
    n = prompt + draft - rejected
    visible = torch.arange(prompt + draft + SOME_TOKENS) >= torch.tensor([[0], [pad]])
    q, k, v = draw(seed, prompt + draft, batch=2)
    cropped, never = cached(fmt, rope, sinks=2), cached(fmt, rope, sinks=2)
    feed(cropped, *(x[:, :, :prompt] for x in (q, k, v)), None, visible)
    probe.record(cropped, True)
    feed(cropped, *(x[:, :, prompt:] for x in (q, k, v)), None, visible)
    cropped.crop(rejected)
    probe.record(cropped, False)
    feed(never, *(x[:, :, :n] for x in (q, k, v)), [prompt, n - prompt], visible)
    order = torch.tensor([1, 0])
    for cache in (cropped, never):
        cache.map(lambda x: x[order])
    new = draw(seed + 1, SOME_TOKENS, batch=2)
    outputs = [feed(cache, *new, SOME, visible[order]) for cache in (cropped, never)]
    torch.testing.assert_close(*outputs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("tokens", [100, 257])
def test_tokens_chosen_by_score_keep_their_positions(tokens):
    """MiniKV's way with keys before RoPE: 8 bits change little, so positions must be right."""
    rope, keep = ROPES["whole"], Keep(Budget(fraction=0.5), Mass(), when="prompt")
    fine = Packed(8, "token", 16, "fp32", pre_rope=True)
    qkv, new = draw(0, tokens, batch=2, hq=4, hk=2), draw(1, 5, batch=2, hq=4, hk=2)
    exact, packed = cached(None, None, keep=keep), cached(fine, rope, keep=keep)
    feed(exact, *qkv)
    feed(packed, *qkv)
    assert_near(feed(packed, *new), feed(exact, *new), 0.02)


def test_predicted_bytes_are_measured_bytes_without_padding():
    for fmt in (LAYER, HEAD, CHANNEL):
        cache = cached(fmt, ROPES["whole"], sinks=2, recent=5)
        feed(cache, *draw(0, 101, hk=2))
        assert cache.nbytes == cache.recipe.nbytes(101, Geometry(1, 2, 2, D, torch.float32))


def test_a_layer_without_a_rotary_embedding_is_refused():
    with pytest.raises(CacheMisuse, match="keys before RoPE need the model's rotary embedding"):
        LayerCache(Recipe(store=Store(keys=HEAD)))
    with pytest.raises(RecipeError, match="values have no rotary embedding"):
        Store(values=HEAD)


def test_numbers_that_turning_may_make_too_large_are_refused():
    fmt = Packed(2, "token", 16, "fp8", pre_rope=True)
    with pytest.raises(NotFinite, match=r"\|x\| > 298\.667 in keys"):
        feed(cached(fmt, ROPES["whole"]), *(300 * torch.ones(3, 1, 1, 4, D)))
