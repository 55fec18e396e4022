"""Attention of more than eight queries to stored tokens, against the reference."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend import reference
from kvloom.kernels.attend.cpu import many_queries
from kvloom.kernels.attend.regions import KVView, Region, Spans
from kvloom.kernels.dispatch import Backend
from kvloom.kernels.limits import Coverage
from kvloom.recipe import resolve
from kvloom.store.kv_side import KVSide

B, HQ, HK, T = 2, 6, 2, 40
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(recipe, tokens, d, dtype, heads=HK, rows=B):
    """Keys and values as a recipe stores them."""
    recipe, views = resolve(recipe), []
    formats = zip(
        (recipe.store.keys, recipe.store.values), recipe.protect.exact_recents, strict=True
    )
    for seed, (fmt, recent) in enumerate(formats, 1):
        x = drawn(rows, heads, tokens, d, dtype=dtype, seed=seed)
        if fmt is None:
            views.append(KVView(None, x))
            continue
        side = KVSide(fmt, max(recent, T))
        side.extend(x, 0)
        views.append(side.kv_view())
    return views


def agree(q, regions, **options):
    scale = q.shape[3] ** -0.5
    with dispatch.use("auto"):
        assert ops.attend.choose(q, regions, scale, **options).backend == "cpu"
        got = ops.attend(q, regions, scale, **options)
    want = reference.attend_regions(q, regions, scale, **options)
    tolerance = TOLERANCES[q.dtype]
    torch.testing.assert_close(got.out, want.out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("recipe", ["near-lossless", "kivi", "rtn:bits=3", "full"])
@pytest.mark.parametrize("step_tokens", [0, T])
def test_dense_tokens(recipe, dtype, step_tokens, subtests):
    tokens = 2 * many_queries.TILE + 300
    for d in (32, 64) if recipe in ("kivi", "rtn:bits=3") else (32, 64, 48):
        views = stored(recipe, tokens, d, dtype)
        q = drawn(B, HQ, T, d, dtype=dtype)
        for heads in (None, 1, HK):
            visible = None
            if heads is not None:
                visible = drawn(B, heads, tokens, seed=7) > -0.5
                visible[1, :, : tokens - 20] = False
            with subtests.test(d=d, mask=heads):
                agree(q, [Region(*views, visible=visible, step_tokens=step_tokens)])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_heads_with_different_numbers_of_tokens(dtype):
    """One of which has none, and one more than a tile."""
    views = stored("near-lossless", 2000, 64, dtype, heads=1, rows=1)
    bounds = torch.tensor([[[0, 300], [300, 0]], [[300, 1500], [1800, 200]]])
    spans = Region(*views, where=Spans(bounds, 1500))
    own = Region.exact(*(drawn(B, HK, T, 64, dtype=dtype, seed=i) for i in (5, 6)), step_tokens=T)
    q = drawn(B, HQ, T, 64, dtype=dtype)
    agree(q, [spans, own])
    visible = drawn(B, HK, 1500, seed=7) > -0.5
    agree(q, [spans._replace(visible=visible), own])
    agree(q, [own, spans], sink_logits=drawn(HQ))


def test_a_past_without_tokens():
    q = drawn(B, HQ, T, 32)
    empty = [KVView(None, q.new_empty(B, HK, 0, 32))] * 2
    own = Region.exact(*(drawn(B, HK, T, 32, seed=i) for i in (5, 6)), step_tokens=T)
    agree(q, [Region(*empty), own])


def test_a_kernel_of_prompts_that_fails_to_load_leaves_the_parts_to_torch(monkeypatch):
    def fails(*args, **options):
        raise OSError("no compiler")

    covers = Backend(fails, Coverage())
    monkeypatch.setattr(ops.attend_prompt, "backends", {"cpu": covers})
    monkeypatch.setattr(ops.attend_prompt, "bindings", {})
    views = stored("near-lossless", 300, 32, torch.float32)
    with pytest.warns(UserWarning, match="attend_prompt: its cpu kernel failed .* no compiler"):
        agree(drawn(B, HQ, T, 32), [Region(*views, step_tokens=T)])


def test_the_past_is_never_unpacked_as_a_whole(monkeypatch):
    views = stored("near-lossless", 8 * many_queries.TILE, 32, torch.float32)
    unpacked, tensor = [], KVView.tensor

    def counted(*args):
        tokens = tensor(*args)
        unpacked.append(tokens.shape[2])
        return tokens

    monkeypatch.setattr(KVView, "tensor", counted)
    with dispatch.use("auto"):
        ops.attend(drawn(B, HQ, T, 32), [Region(*views, step_tokens=T)], 0.2)
    assert max(unpacked) == many_queries.TILE
    assert sum(unpacked) == 2 * 8 * many_queries.TILE


def test_other_cases_are_left_to_the_reference(subtests):
    q = drawn(B, HQ, T, 32)
    views = stored("near-lossless", 300, 32, torch.float32)
    region = Region(*views, step_tokens=T)
    cases = {
        "softcap": (q, region, {"softcap": 20.0}),
        "bias": (q, region._replace(bias=drawn(1, HQ, 300)), {}),
        "dtype": (q.double(), region, {}),
        "gradient": (q.clone().requires_grad_(), region, {}),
    }
    for name, (queries, case, options) in cases.items():
        with subtests.test(name), dispatch.use("auto"):
            bound = ops.attend.choose(queries, [case], 0.2, **options)
            assert bound.backend == "ref"
            assert bound.why


@pytest.mark.sample
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("queries", [1, 5, 10, T])
def test_the_newest_queries_of_a_step(dtype, queries):
    """A layer that shares keys may attend by fewer queries than the step has."""
    q, views = drawn(B, HQ, T, 32, dtype=dtype), stored("near-lossless", 300, 32, dtype)
    regions, scale = [Region(*views, step_tokens=T)], 32**-0.5
    want = reference.attend_regions(q, regions, scale)
    with dispatch.use("auto"):
        got = ops.attend(q[:, :, T - queries :], regions, scale)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        got.out.float(), want.out[:, :, T - queries :], rtol=tolerance, atol=tolerance
    )
