"""Turning keys: rotations compose, invert and keep lengths; by hand for one pair."""

from __future__ import annotations

import math

import pytest
import torch

from kvloom.positions.rope import Rope

INV_FREQ = torch.tensor([1.0, 0.25, 0.01])


def keys(dtype=torch.float32):
    return torch.randn(2, 3, 5, 8).to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_composes_and_inverts(interleaved):
    rope, x = Rope(INV_FREQ, interleaved), keys()
    a, b = torch.randint(0, 5000, (2, 3, 5)), torch.randint(0, 5000, (1, 1, 5))
    twice = rope.rotate(rope.rotate(x, a), b)
    torch.testing.assert_close(twice, rope.rotate(x, a + b), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rope.rotate(rope.rotate(x, a), -a), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_does_not_rotate_stays_and_lengths_stay(interleaved):
    x = keys()
    y = Rope(INV_FREQ, interleaved).rotate(x, torch.full((1, 1, 5), 7))
    assert torch.equal(y[..., 6:], x[..., 6:])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(y[..., :6], x[..., :6])


def test_one_pair_by_hand():
    x = torch.tensor([1.0, 0.0, 0.0, 1.0]).view(1, 1, 1, 4)
    inv_freq = torch.tensor([math.pi / 2, 0.0])
    quarter = torch.tensor([[[1]]])
    halves = Rope(inv_freq).rotate(x, quarter)  # pairs (0, 2) and (1, 3)
    torch.testing.assert_close(halves.flatten(), torch.tensor([0.0, 0.0, 1.0, 1.0]))
    neighbors = Rope(inv_freq, interleaved=True).rotate(x, quarter)  # pairs (0, 1) and (2, 3)
    torch.testing.assert_close(neighbors.flatten(), torch.tensor([0.0, 1.0, 0.0, 1.0]))


def test_the_dtype_stays():
    x = keys(torch.bfloat16)
    assert Rope(INV_FREQ).rotate(x, torch.zeros(1, 1, 5)).equal(x)


def test_angles_that_are_kept_serve_later_calls_of_any_kind():
    """A first call in inference mode, or while torch makes tensors elsewhere."""
    rope = Rope(1e4 ** -(torch.arange(4).float() / 4))
    x, shift = torch.randn(1, 1, 3, 8), 7
    with torch.inference_mode(), torch.device("meta"):
        first = rope.rotate(x, shift)
    x.requires_grad_()
    again = rope.rotate(x, shift)
    again.sum().backward()
    assert torch.equal(again.detach(), first)
    assert x.grad is not None
