"""Each score by its formula, on one step: temperature, damping, and which queries vote."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import naive
from kvloom.keep import Mass, Noisy, Observation, Step

B, HQ, HK, N, D = 2, 4, 2, 30, 16


def step(t: int, number: int = 0, real=None, group: str = "sum") -> Step:
    """A step of the last t of N tokens, the same numbers every time."""
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(B, h, n, D, generator=g) for h, n in ((HQ, t), (HK, N)))
    index = torch.arange(N)[None, None]
    return Step(q, k, k, 0.5, index, N, number, query_heads=group, visible_queries=real)


def mass(one: Step, rows: int, tau: float = 1.0):
    """Mass that the newest `rows` queries give, by loops, summed over the heads of a group."""
    real = None if one.visible_queries is None else one.visible_queries[:, :, -rows:].numpy()
    q, k = one.q[:, :, -rows:].double().numpy(), one.k.double().numpy()
    return (
        naive.column_mass(q, k, 0.5, visible_queries=real, tau=tau)
        .reshape(B, HK, -1, N)
        .sum(axis=2)
    )


@pytest.mark.parametrize(("number", "tau"), [(0, 1.0), (1, 1.25), (3, 1.75), (4, 2.0), (9, 2.0)])
def test_the_temperature_rises_with_the_decode_steps(number, tau):
    scorer = Noisy("none", tau_begin=1.0, tau_end=2.0, steps=4)
    one = step(1, number)
    np.testing.assert_allclose(scorer(one).numpy(), mass(one, 1, tau), rtol=1e-4)


def test_damping_scales_what_a_token_had():
    held, new = torch.tensor([4.0, 0.0]), torch.tensor([1.0, 3.0])
    assert Mass(0.5).join(held, new).tolist() == [3.0, 3.0]
    assert Mass().join(held, new).tolist() == [5.0, 3.0]


@pytest.mark.parametrize("window", [1, 5, 40])
def test_padding_does_not_vote_in_an_observation_window(window):
    """Some queries of the window are padding, and others before it are not."""
    t = 12
    real = torch.ones(B, 1, t, dtype=torch.bool)
    real[1, 0, 9:11] = real[0, 0, :4] = False
    one = step(t, real=real)
    found = Observation(window, "none")(one)
    np.testing.assert_allclose(found.numpy(), mass(one, min(t, window)), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("group", ["sum", "mean", "max"])
def test_the_heads_of_a_group_have_one_score(group):
    one = step(3, group=group)
    heads = naive.column_mass(one.q.double().numpy(), one.k.double().numpy(), 0.5)
    want = getattr(heads.reshape(B, HK, -1, N), group)(axis=2)
    np.testing.assert_allclose(Mass()(one).numpy(), want, rtol=1e-4, atol=1e-9)
