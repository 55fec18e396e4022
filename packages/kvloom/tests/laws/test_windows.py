"""A packed window holds the newest tokens as a layer without a window stores them, and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import probe
from kvloom.cache.layer import LayerCache
from kvloom.cache.step import Queries, StepInputs
from kvloom.errors import CacheMisuse, RecipeError
from kvloom.recipe import Geometry, SlidingLayer, resolve
from steps import RECIPES, SCALE, D, assert_same_state, draw, state

PACKED = (
    "kivi:group=32,residual=32", "kivi:group=16,residual=64,meta=fp32",
    "kivi:bits=1.5,group=32,residual=32,meta=fp8", "rtn:bits=3,residual=5", "fp8, layer",
    "swapped axes", "channels", "rotated heads", "keys only", "values only",
)  # fmt: skip
STORES = RECIPES | {"units": resolve("store:bits=2,group=16,residual=64,unit=16")}
B, HQ, HK = 2, 4, 2

UNITS = pytest.param("units", marks=pytest.mark.rare)
each_store = pytest.mark.parametrize("name", [*PACKED, UNITS])
steps = st.lists(st.sampled_from([1, 1, 1, 2, 30, 64, 65, 200]), min_size=1, max_size=6)


def windowed(name: str, window: int) -> LayerCache:
    return LayerCache(replace(STORES[name], sliding="packed").in_windows, window=window)


def exact_attention(q: Tensor, k: Tensor, v: Tensor, window: int, visible: Tensor) -> Tensor:
    """Attend in float64 by the newest T queries; visible: bool [B, N]."""
    t, n = q.shape[2], k.shape[2]
    k, v = (x.double().repeat_interleave(HQ // HK, dim=1) for x in (k, v))
    behind = torch.arange(n - t, n)[:, None] - torch.arange(n)
    seen = (behind >= 0) & (behind < window) & visible[:, None, None]
    logits = (q.double() @ k.mT * SCALE).masked_fill(~seen, -torch.inf)
    return (logits.softmax(-1).nan_to_num() @ v).float()


def feed_window(cache: LayerCache, qkv, sizes: list[int], visible: Tensor, window: int) -> Tensor:
    """Attend in steps; those of several tokens as the model does, whose attention it passes."""
    outs = []
    for t in sizes:
        at, first = cache.seen, cache.seen == 0
        q, k, v = (x[:, :, at : at + t] for x in qkv)
        see = visible[:, : cache.seen + t]
        attended = None
        if t > 1:
            past = (k[:, :, :0], v[:, :, :0]) if first else cache.past_window()
            both = [torch.cat(pair, dim=2) for pair in zip(past, (k, v), strict=True)]
            held = see[:, -both[0].shape[2] :]
            attended = exact_attention(q, *both, window, held)
        step = StepInputs(Queries(q, SCALE, see[:, None]), k, v, attended)
        outs.append(cache.run(step))
        cache.forget_undo()
    return torch.cat(outs, dim=2)


def all_visible(tokens: int) -> Tensor:
    return torch.ones(B, tokens, dtype=torch.bool)


@each_store
@given(sizes=steps, window=st.integers(160, 260), pad=st.integers(0, 30), seed=st.integers(0, 99))
def test_a_window_stores_the_newest_tokens_as_a_layer_without_one(name, sizes, window, pad, seed):
    sizes = [250, *sizes]
    n = sum(sizes)
    qkv = draw(seed, n + 1, B, HQ, HK)
    visible = torch.arange(n + 1) >= torch.tensor([[0], [pad]])
    cache, whole = windowed(name, window), windowed(name, 10**6)
    feed_window(cache, qkv, sizes, visible, window)
    feed_window(whole, qkv, sizes, visible, n)
    for held, all_held in zip(cache.past_window(), whole.past_window(), strict=True):
        newest = min(n, window - 1)
        assert held.shape[2] == newest
        shown = visible[:, None, n - newest : n, None].expand_as(held)
        torch.testing.assert_close(held[shown], all_held[:, :, -newest:][shown], rtol=0, atol=0)
    q, *new = (x[:, :, -1:] for x in qkv)
    seen = [torch.cat(pair, dim=2) for pair in zip(whole.past_window(), new, strict=True)]
    out = feed_window(cache, qkv, [1], visible, window)
    torch.testing.assert_close(
        out, exact_attention(q, *seen, window, visible), rtol=2e-4, atol=2e-5
    )
    assert probe.count(cache) < window + max(32, cache.recipe.store.block_tokens)


@each_store
@given(tokens=st.integers(1, 900), window=st.integers(160, 260))
def test_the_bytes_of_a_window_are_predicted(name, tokens, window):
    q, k, v = draw(1, tokens, B, HQ, HK)
    cache = windowed(name, window)
    feed_window(cache, (q, k, v), [tokens], all_visible(tokens), window)
    g = Geometry(1, HQ, HK, D, torch.float32)
    layer = SlidingLayer(0, window, g)
    recipe = replace(STORES[name], sliding="packed")
    assert cache.nbytes == recipe.window_nbytes(tokens, layer) * B
    exact = replace(recipe, sliding="exact").window_nbytes(tokens, layer)
    assert exact == min(tokens, window - 1) * HK * 2 * D * 4  # what transformers holds


@each_store
@given(prompt=st.integers(2, 400), draft=st.integers(1, 40), rejected=st.integers(0, 40))
def test_a_crop_undoes_a_draft(name, prompt, draft, rejected):
    rejected, window = min(draft, rejected), 160
    n = prompt + draft - rejected
    qkv = draw(3, prompt + draft, B, HQ, HK)
    visible = all_visible(prompt + draft)
    cropped, never = windowed(name, window), windowed(name, window)
    feed_window(cropped, qkv, [prompt], visible, window)
    feed_window(never, qkv, [prompt, *[1] * (n - prompt)], visible, window)
    probe.record(cropped, True)
    feed_window(cropped, qkv, [draft], visible, window)
    cropped.crop(rejected)
    probe.record(cropped, False)
    assert_same_state(state(cropped), state(never))


def test_a_crop_that_needs_tokens_before_the_window_is_refused():
    window, name = 160, "kivi:group=32,residual=32"
    qkv = draw(4, 319, B, HQ, HK)
    cache = windowed(name, window)
    feed_window(cache, qkv, [300, *[1] * 19], all_visible(319), window)
    before = state(cache)
    assert probe.count(cache) == window - 1
    with pytest.raises(CacheMisuse, match="have left the sliding window"):
        cache.check_crop(1)
    assert_same_state(state(cache), before)


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("full", "in the formats of the store, which has none"),
        ("keyformer", "in the formats of the store, which has none"),
        ("skvq", "without pre_rope and without calibration"),
    ],
)
def test_a_store_that_cannot_pack_windows_is_refused(recipe, says):
    with pytest.raises(RecipeError, match=says):
        resolve(f"{recipe}:sliding=packed")
    with pytest.raises(RecipeError, match="is not one of exact, packed"):
        resolve(f"{recipe}:sliding=2")


def test_a_short_window_is_refused_with_its_layers():
    g = Geometry(1, HQ, HK, D, torch.float32, sliding=())
    layers = tuple(SlidingLayer(i, 60, g) for i in (1, 2, 5))
    recipe = resolve("kivi:group=32,residual=32,sliding=packed")
    (problem,) = recipe.problems(replace(g, sliding=layers))
    assert "layers 1-2, 5: " in problem
    assert "window of 60 tokens is too short for the 33 that may be exact" in problem
