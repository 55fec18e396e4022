"""Noise from counters: the right distributions, and a function of its numbers alone."""

from __future__ import annotations

import math

import pytest
import torch

from kvloom.kernels.score.noise import KINDS, Noise

EULER, DEVIATION = 0.5772156649, math.pi / math.sqrt(6)


def draw(kind="gumbel", seed=1, keys=2000, rows=500, fixed=False, first=0):
    index = torch.arange(keys)[None, None]
    return Noise(kind, seed, index, first, fixed).block(2, 2, 0, rows, keys)


def cdf(kind, x):
    if kind == "gumbel":
        return math.exp(-math.exp(-x))
    return 0.5 * (1 + math.erf((x - EULER) / DEVIATION / math.sqrt(2)))


@pytest.mark.parametrize("kind", ["gumbel", "gaussian"])
def test_the_distribution(kind):
    x = draw(kind)
    n = x.numel()
    assert abs(x.mean().item() - EULER) < 5 * DEVIATION / math.sqrt(n)
    assert abs(x.std().item() - DEVIATION) < 0.01
    for at in (-1.0, 0.0, 0.5, 1.0, 2.0, 4.0):
        share = (x <= at).float().mean().item()
        assert abs(share - cdf(kind, at)) < 5 * 0.5 / math.sqrt(n)


def test_the_constant_is_the_mean_of_the_others():
    assert draw("constant").unique().tolist() == pytest.approx([EULER])


@pytest.mark.parametrize(
    "step", [(0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1), (1, 0, 0, 0)]
)
def test_neighbors_are_not_correlated(step):
    """Heads of two key/value heads, heads of one, queries, keys, and both."""
    g, r, row, key = step
    x = draw()[0] - EULER
    a = x[: 2 - g, : 2 - r, : 500 - row, : 2000 - key]
    b = x[g:, r:, row:, key:]
    correlation = (a * b).mean() / x.var()
    assert abs(correlation.item()) < 5 / math.sqrt(a.numel())


def test_seeds_differ():
    x, y = draw(seed=1) - EULER, draw(seed=2) - EULER
    assert abs(((x * y).mean() / x.var()).item()) < 5 / math.sqrt(x.numel())


def test_fixed_is_one_number_a_key():
    fixed = draw(fixed=True)
    assert fixed.shape == (1, 2, 2, 1, 2000)
    later = draw(fixed=True, first=123)
    assert torch.equal(fixed, later)
    assert not torch.equal(draw(first=123), draw())


def test_a_key_has_its_noise_wherever_it_is_stored():
    order = torch.randperm(50)
    there = Noise("gumbel", 1, order.expand(3, 2, -1), first=49).block(2, 2, 0, 1, 50)
    here = Noise("gumbel", 1, torch.arange(50)[None, None], first=49).block(2, 2, 0, 1, 50)
    assert torch.equal(there, here[..., order].expand(3, -1, -1, -1, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_by_hand(kind):
    """The formula in Python's own integers."""
    mask = 0xFFFFFFFF

    def h(x):
        x = (x ^ (x >> 16)) * 0x85EBCA6B & mask
        x = (x ^ (x >> 13)) * 0xC2B2AE35 & mask
        return x ^ (x >> 16)

    head, query, key, seed = 3, 70_001, 90_000, 11
    state = h((seed + head * 0x9E3779B1) & mask)
    state = h((state + query * 0x85EBCA77) & mask)
    state = h((state + key * 0xC2B2AE3D) & mask)
    u = ((state & 0xFFFFFF) + 0.5) / 2**24
    want = {
        "gumbel": -math.log(-math.log(u)),
        "gaussian": EULER + DEVIATION * torch.special.ndtri(torch.tensor(u).double()).item(),
        "constant": EULER,
    }[kind]
    got = Noise(kind, seed, torch.tensor([[[key]]]), query).block(2, 2, 0, 1, 1)[0, 1, 1, 0, 0]
    assert got.item() == pytest.approx(want, rel=1e-4)


def test_the_largest_number_that_is_drawn_is_finite():
    """The counter of this key ends in 24 ones: + 0.5 rounds up to 2^24 in fp32, and u to 1."""
    keys = torch.tensor([[[1_408_816, 1_408_817]]])
    drawn = Noise("gumbel", 1, keys, 0).block(1, 1, 0, 1, 2).flatten()
    assert drawn[1].item() == pytest.approx(24 * math.log(2), rel=1e-6)
    assert drawn[0] < drawn[1]


@pytest.mark.parametrize("r", [1, 2])
def test_the_noise_of_some_heads_is_that_of_the_same_heads_among_all(r):
    keys = torch.arange(50)[None, None]
    every = Noise("gumbel", 2**32 - 3, keys, 7).block(6, r, 0, 4, 50)
    some = Noise("gumbel", 2**32 - 3, keys, 7, head=4).block(2, r, 0, 4, 50)
    assert torch.equal(some, every[:, 4:])
