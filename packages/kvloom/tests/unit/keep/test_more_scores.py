"""Expected Attention, key norm and VATP by their formulas; what each score refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import naive_recipes as rules
from kvloom.errors import RecipeError
from kvloom.keep import (
    Budget,
    Expected,
    Keep,
    KeyNorm,
    Mass,
    Observation,
    Outliers,
    Reconstruction,
    Rotated,
    Step,
    TriAttention,
    ValueAware,
)
from kvloom.kernels.attend.reference import attend_exact
from kvloom.positions.rope import Rope
from kvloom.recipe import Recipe
from kvloom.recipe.resolve import resolve

B, HQ, HK, N, D = 2, 4, 2, 30, 16
INV_FREQ = 100.0 ** -(torch.arange(0, D, 2) / D)


def step(t: int = N, **changes) -> Step:
    """A step of the last t of N tokens, the same numbers every time."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(B, h, n, D, generator=g) for h, n in ((HQ, t), (HK, N), (HK, N)))
    one = Step(q + 1, k, v, 0.5, torch.arange(N)[None, None], N, query_heads="mean", sinks=4)
    return replace(one, **changes)


def by_head(one: Step):
    """(row, head, its q, k and v in float64) of every head."""
    for b in range(B):
        for h in range(HK):
            q = one.q[b, 2 * h : 2 * h + 2]
            yield b, h, *(x.double().numpy() for x in (q, one.k[b, h], one.v[b, h]))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [0, 4, 100])
def test_sinks_are_the_first_tokens_wherever_their_slots_are(sinks, padded):
    g = torch.Generator().manual_seed(sinks)
    index = torch.stack([torch.randperm(N, generator=g) for _ in range(B * HK)]).view(B, HK, N)
    visible = index % 3 > 0 if padded else None  # each head's padding is where its slots are
    mask = step(index=index, visible=visible, sinks=sinks).sink_mask
    for b in range(B):
        for h in range(HK):
            real = [i for i in range(N) if i % 3 or not padded]
            assert sorted(index[b, h][mask[b, h]].tolist()) == real[:sinks]


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(("future", "sinks", "epsilon"), [(1, 0, 0.0), (40, 4, 0.02), (512, 1, 0)])
def test_expected_attention(future, sinks, epsilon, rotates):
    one = step(rope=Rope(INV_FREQ) if rotates else None, sinks=sinks)
    found = Expected(future, epsilon)(one)
    inv_freq = INV_FREQ.double().numpy() if rotates else None
    for b, h, q, k, v in by_head(one):
        want = rules.expected(q, k, v, 0.5, inv_freq, future, sinks, epsilon)
        np.testing.assert_allclose(found[b, h].numpy(), want, rtol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("furthest", "sinks"), [(1, 0), (100, 4), (65536, 1)])
def test_triattention(furthest, sinks, interleaved):
    """The sum of cosines, in complex numbers."""
    one = step(rope=Rope(INV_FREQ), sinks=sinks, query_heads="max")
    found = TriAttention(furthest)(one)
    order = torch.arange(D).view(2, -1).T.flatten()
    if interleaved:
        one.q, one.k, one.rope = one.q[..., order], one.k[..., order], Rope(INV_FREQ, True)
        torch.testing.assert_close(TriAttention(furthest)(one), found, rtol=1e-4, atol=1e-4)
        return
    for b, h, q, k, _ in by_head(one):
        want = rules.triattention(q, k, INV_FREQ.double().numpy(), furthest, sinks)
        np.testing.assert_allclose(found[b, h].numpy(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sinks", [0, 4])
def test_rotated_takes_what_attention_has_summed(sinks, padded, softcap):
    visible = torch.arange(N) >= torch.tensor([0, 7])[:, None, None] if padded else None
    one = step(rope=Rope(INV_FREQ), sinks=sinks, softcap=softcap, visible=visible,
               visible_queries=visible)  # fmt: skip
    want = Rotated()(one)
    lse = attend_exact(
        one.q, one.k, one.v, one.scale, causal=True, visible=visible, softcap=softcap
    ).lse
    torch.testing.assert_close(Rotated()(replace(one, lse=lse)), want, rtol=1e-4, atol=0)
    wrong = Rotated()(replace(one, lse=lse + 1))  # it is read
    assert (wrong < want)[want > 0].any()
    chunks = Rotated(chunk=20)(one)  # a chunk does not know its own part of the sum
    assert torch.equal(Rotated(chunk=20)(replace(one, lse=lse)), chunks)


def test_rotated_where_sinks_hold_nearly_all_weight():
    """What fp32 leaves of 1 minus their weights is no sum of the others'."""
    one = step(rope=Rope(INV_FREQ))
    one.k[:, :, :4] += 3
    found, inv_freq = Rotated(contribution=False)(one), INV_FREQ.double().numpy()
    earlier = np.tri(N, dtype=bool) & (np.arange(N) >= 4)
    for b, h, q, k, _ in by_head(one):
        own = np.exp(0.5 * q @ k.T)
        assert ((own * earlier).sum(-1) / (own * np.tri(N)).sum(-1))[:, 4:].min() < 1e-6
        after = np.exp(0.5 * rules.turned(q, N, inv_freq) @ k.T)
        weights = after / (after.sum(-1) + (own * earlier).sum(-1))[..., None]
        np.testing.assert_allclose(found[b, h], weights.max(axis=1).mean(axis=0), rtol=2e-4)


def test_expected_attention_is_that_of_drawn_queries():
    """The expectation of exp(logit), by drawing Gaussian queries instead of by its formula."""
    one = step(sinks=0)
    one.q, one.scale = one.q * 0.5, 0.25
    found = Expected()(one)
    for b, h, q, k, v in by_head(one):
        weights = 0
        for head in q:
            covariance = np.cov(head.T, bias=True)
            drawn = np.random.default_rng(0).multivariate_normal(head.mean(0), covariance, 200_000)
            mean = np.exp(0.25 * drawn @ k.T).mean(axis=0)
            weights = weights + mean / mean.sum() / 2
        np.testing.assert_allclose(found[b, h], weights * np.linalg.norm(v, axis=1), rtol=0.05)


@pytest.mark.parametrize("score", [Expected(), TriAttention()])
@pytest.mark.parametrize("rope", [None, Rope(INV_FREQ)])
def test_padding_in_front_changes_no_score(rope, score):
    """The last 20 of 30 tokens alone, at the positions of a model that does not count padding."""
    visible = torch.ones(B, 1, N, dtype=torch.bool)
    visible[:, :, :10] = False
    whole = step(rope=rope)
    padded = step(rope=rope, visible=visible, visible_queries=visible)
    alone = step(rope=rope, seen=20, index=torch.arange(20)[None, None])
    alone.q, alone.k, alone.v = (x[:, :, 10:] for x in (whole.q, whole.k, whole.v))
    if rope is not None:  # rotated as at positions from 0 on
        alone.q, alone.k = (rope.rotate(x, torch.full((1, 1, 20), -10)) for x in (alone.q, alone.k))
    found, want = score(padded), score(alone)
    np.testing.assert_allclose(found[..., 10:], want, rtol=1e-3, atol=1e-3)
    assert (found[..., :10] == 0).all()


def test_a_contribution_is_a_weight_times_a_value_norm_over_the_mean_input_norm():
    norms = torch.rand(B, N) + 1
    one = step(norms=norms)
    weights = Rotated(contribution=False)(one)
    values = one.v.double().norm(dim=-1)
    expected = weights * values / norms.mean(dim=1)[:, None, None]
    torch.testing.assert_close(Rotated()(one).double(), expected.double(), rtol=1e-5, atol=0)
    without = Rotated()(step())  # of a model that does not give the norms
    torch.testing.assert_close(without.double(), weights * values, rtol=1e-5, atol=0)
    visible = (torch.arange(N) >= 10).expand(B, 1, N)
    norms[:, :10] = 1e9  # of padding
    padded = step(norms=norms, visible=visible, visible_queries=visible)
    weights = Rotated(contribution=False)(padded)
    expected = weights * values / norms[:, 10:].mean(dim=1)[:, None, None]
    torch.testing.assert_close(Rotated()(padded).double(), expected.double(), rtol=1e-5, atol=0)


def test_the_mean_of_rotations():
    rope, x = Rope(INV_FREQ), torch.randn(2, 3, D)
    by = torch.tensor([0, 3, 50])
    want = [rules.turned(x.double().numpy(), at, INV_FREQ.double().numpy()) for at in by.tolist()]
    np.testing.assert_allclose(rope.rotate_mean(x, by), sum(want) / 3, rtol=1e-4, atol=1e-6)


def test_key_norm():
    one = step()
    np.testing.assert_allclose(KeyNorm()(one), -np.linalg.norm(one.k.numpy(), axis=-1), rtol=1e-5)


@pytest.mark.parametrize("base", [Mass(0.5), Observation(8)])
def test_a_value_aware_score_is_its_base_times_the_norm(base):
    one, score = step(), ValueAware(base)
    want = base(one).numpy() * np.abs(one.v.numpy()).sum(axis=-1)
    np.testing.assert_allclose(score(one), want, rtol=1e-5)
    former, new = torch.tensor([4.0, 0.0]), torch.tensor([1.0, 3.0])
    assert torch.equal(score.join(former, new), base.join(former, new))


@pytest.mark.parametrize("base", [Mass(0.9), Observation(16, "max")])
def test_the_base_of_a_value_aware_score_is_written_down(base):
    data = resolve("vatp").to_dict()
    data["keep"]["scorer"]["base"] = {"kind": base.kind, **vars(base)}
    recipe = Recipe.from_dict(data)
    assert recipe.keep.scorer == ValueAware(base)
    assert Recipe.from_toml(recipe.to_toml()) == recipe


class Own(Mass):
    """Not kvloom's own: it may return NaN, or read what a value-aware score does not ask for."""


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Expected(future=0), "future=0 must be a whole number of positions, 1 or more"),
        (lambda: Expected(epsilon=-1.0), "epsilon=-1.0 must be 0 or more"),
        (lambda: TriAttention(0), "furthest=0 must be a whole number, 1 or more"),
        (lambda: ValueAware(KeyNorm()), "must be one of kvloom's own scores of attention, such as"),
        (lambda: ValueAware(Reconstruction()), "must be one of kvloom's own scores of attention"),
        (lambda: ValueAware(Own()), r"base=.*Own\(damping=1.0\) of a value-aware score must be"),
        (lambda: ValueAware("mass"), "base='mass' of a value-aware score must be one"),
        (lambda: Rotated(chunk=0), "chunk"),
        (lambda: Rotated(contribution=2), "contribution=2 must be True or False"),
        (lambda: Keep(Budget(8), Rotated()), "whole prompt, so it cannot score steps"),
        (lambda: Outliers(8, Rotated()), "rotates the prompt's queries, which outliers"),
        (lambda: Outliers(8, Expected()), "rotates the prompt's queries, which outliers"),
        (lambda: Reconstruction(instruction=""), 'token ids separated by spaces, .* or "none"'),
    ],
)
def test_options_out_of_range_are_refused(build, message):
    with pytest.raises(RecipeError, match=message):
        build()
