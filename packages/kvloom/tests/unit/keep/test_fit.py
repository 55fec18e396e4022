"""Fitted values: ridge regression on the prompt's rotated queries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_more_scores import HK, HQ, INV_FREQ, B, D, N, step

import naive_recipes as rules
from kvloom.errors import RecipeError
from kvloom.keep import Budget, Expected, Fit, Keep, Rotated
from kvloom.keep.fit import RIDGE
from kvloom.positions.rope import Rope
from kvloom.recipe import Recipe, resolve

R = HQ // HK


def fitted(fit: Fit, one, kept, keys):
    one.q = fit.sampled(one.q, one.visible)
    return fit(one, kept, keys)


def chosen(seed: int = 0, share: float = 0.5) -> torch.Tensor:
    kept = torch.rand(B, HK, N, generator=torch.Generator().manual_seed(seed)) < share
    kept[..., :4] = kept[..., -3:] = True
    return kept


def weights(q, k, scale, softcap, by, inv_freq):
    """Softmax in float64 of queries that are rotated `by` positions."""
    if inv_freq is not None:
        q = rules.turned(q, by, inv_freq)
    logits = q @ k.T * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(
    ("queries", "softcap", "count"), [(N, None, N), (N // 3, 4.0, N), (N, None, 5)]
)
def test_the_values_are_those_of_the_formula(queries, softcap, count, rotates):
    rope = Rope(INV_FREQ) if rotates else None
    one, kept = step(rope=rope, softcap=softcap), chosen()
    q_all, k_all, v_all = (x.double().numpy() for x in (one.q, one.k, one.v))
    keys = one.k + 0.1 * torch.randn(one.k.shape, generator=torch.Generator().manual_seed(3))
    found = fitted(Fit(queries=queries, values=count), one, kept, keys)
    inv_freq = INV_FREQ.double().numpy() if rotates else None
    for b in range(B):
        for h in range(HK):
            s = kept[b, h].numpy()
            q = q_all[b, R * h : R * h + R, :: N // queries].reshape(-1, D)
            k, v = k_all[b, h], v_all[b, h]
            y = weights(q, k, 0.5, softcap, N, inv_freq) @ v
            x = weights(q, keys[b, h].double().numpy()[s], 0.5, softcap, N, inv_freq)
            change = np.zeros_like(v[s])
            largest = np.argsort(-x[::8].sum(axis=0))[: min(count, len(x) // 2)]
            z = x[:, largest]
            gram = z.T @ z
            delta = np.sort(np.diag(gram))[(len(gram) - 1) // 2]
            system = gram + RIDGE * delta * np.eye(len(gram))
            change[largest] = np.linalg.solve(system, z.T @ (y - x @ v[s]))
            np.testing.assert_allclose(found[b, h][s].numpy() - v[s], change, rtol=1e-2, atol=2e-4)
            assert np.linalg.norm(y - x @ (v[s] + change)) < np.linalg.norm(y - x @ v[s])
            assert torch.equal(found[b, h][~s].double(), torch.from_numpy(v[~s]))


@pytest.mark.parametrize("padded", [False, True])
def test_a_chunk_or_a_head_may_keep_no_token(padded):
    """The values of other chunks and heads are fitted as without it."""
    kept, visible = chosen(), torch.ones(B, 1, N, dtype=torch.bool)
    kept[:, :, : N // 2] = False
    kept[:, 0] = False
    if padded:
        visible[1, 0, : N // 4] = False
    one = step(visible=visible if padded else None)
    found = fitted(Fit(chunk=N // 4), one, kept, one.k + 0.1)
    assert torch.equal(found[~kept], one.v[~kept])
    assert bool(found.isfinite().all())
    changed = (found != one.v).any(dim=-1)
    assert bool(changed[:, 1:].any())
    assert not bool(changed[:, 0].any())


def test_values_stay_where_all_tokens_stay_or_the_error_does_not_shrink():
    every_token = torch.ones(B, HK, N, dtype=torch.bool)
    one = step()
    assert torch.equal(fitted(Fit(), one, every_token, one.k), one.v)
    one = step()
    one.v[0, 0, 5] = torch.nan  # another head is fitted
    values = fitted(Fit(), one, chosen(), one.k)
    assert torch.equal(values[0, 0, ~torch.isnan(one.v[0, 0, :, 0])],
                       one.v[0, 0, ~torch.isnan(one.v[0, 0, :, 0])])  # fmt: skip
    assert not torch.equal(values[1, 1], one.v[1, 1])


def test_rounding_changes_no_value_that_hardly_counts():
    one = step()
    one.k[:, :, 0] = 5.0  # a sink with nearly all of the weight
    values = fitted(Fit(), one, chosen(), one.k)
    assert (values - one.v).abs().max() < 0.1


def test_one_row_changes_no_value():
    one = step()
    one.q = one.q[:, :HK, :1]
    assert torch.equal(Fit()(one, chosen(), one.k, without_query=N - 1), one.v)


def test_values_stay_in_a_chunk_without_a_row():
    one = step()
    one.q = one.q[:, :, 12:]
    values = Fit(chunk=10)(one, chosen(), one.k, without_query=12)
    assert torch.equal(values[:, :, :10], one.v[:, :, :10])
    assert not torch.equal(values[:, :, 10:], one.v[:, :, 10:])


@pytest.mark.parametrize("chunk", [9, 2048])
def test_padding_changes_nothing(chunk):
    visible = (torch.arange(N) >= 10).expand(B, 1, N)
    padded = step(visible=visible)
    kept, keys, whole = chosen(1), padded.k * 1.1, step()
    alone = step(seen=20)
    alone.q, alone.k, alone.v = (x[:, :, 10:] for x in (whole.q, whole.k, whole.v))
    found = fitted(Fit(chunk), padded, kept, keys)
    expected = fitted(Fit(chunk), alone, kept[..., 10:], keys[:, :, 10:])
    torch.testing.assert_close(found[:, :, 10:], expected)
    assert torch.equal(found[:, :, :10], padded.v[:, :, :10])


def test_the_sinks_are_fitted_with_the_first_chunk_alone():
    one, kept = step(), chosen(2)
    one.sinks = 2
    first = step(seen=10, sinks=2)
    first.q, first.k, first.v = (x[:, :, :10] for x in (one.q, one.k, one.v))
    expected = fitted(Fit(10), first, kept[..., :10], one.k[:, :, :10])
    found = fitted(Fit(12), one, kept, one.k)  # three chunks of 10
    torch.testing.assert_close(found[:, :, :10], expected)
    assert not torch.equal(found[:, :, 12:], one.v[:, :, 12:])


def test_a_recipe_with_a_fit_is_written_down():
    recipe = resolve("rotated:fraction=0.2,fit=true,chunk=512,sinks=2")
    assert recipe.keep.fit == Fit(512)
    assert Recipe.from_toml(recipe.to_toml()) == recipe
    assert resolve("rotated").keep.fit is None


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Fit(chunk=0), "chunk"),
        (lambda: Fit(queries=0), "queries"),
        (lambda: Fit(values=0), "values"),
        (lambda: Keep(Budget(8), Expected(), when="prompt", fit=Fit()), "use the score rotated"),
        (
            lambda: Keep(Budget(8), Rotated(), when="prompt", positions="renumbered", fit=Fit()),
            'use positions="original"',
        ),
        (lambda: resolve("rotated:fit=true,store=skvq"), "leave out pre_rope"),
    ],
)
def test_options_that_do_not_fit_are_refused(build, message):
    with pytest.raises(RecipeError, match=message):
        build()
