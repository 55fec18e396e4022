"""Kitty (arXiv:2511.18643): numbers by hand, the definition by loops, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvloom_formats.kitty import Kitty

from kvloom.errors import RecipeError
from kvloom.kernels import unpack_codes
from kvloom.recipe import Geometry, resolve

GROUP = 16


def by_loops(x, boost):
    """What comes back of a group x [tokens, D] in float64, and which channels have 4 bits."""
    low, high = x.min(axis=0), x.max(axis=0)
    wide = sorted(range(x.shape[1]), key=lambda c: (low[c] - high[c], c))[:boost]
    out = np.zeros_like(x)
    for c in range(x.shape[1]):
        top = 15 if c in wide else 3
        step = (high[c] - low[c]) / top
        codes = np.rint((x[:, c] - low[c]) / step) if step else 0 * x[:, c]
        out[:, c] = codes * step + low[c]
    return out, wide


@pytest.mark.parametrize("boost", [8, 16])
def test_the_widest_channels_of_each_group_have_four_bits(boost):
    x = torch.randn(1, 2, 3 * GROUP, 32).double()
    x[..., 5] *= 9
    x[..., 7] = 0.25  # constant: exact, and never boosted
    x[0, 0, :, 8:] = 1.0  # fewer channels than `boost` are not constant
    fmt = Kitty(boost, GROUP, GROUP)
    tensors = fmt.pack(x)
    packed, scale, _ = tensors
    assert packed.shape == (1, 2, 3 * GROUP // 4, 32 + boost)
    assert sum(part.nbytes for part in tensors) == fmt.nbytes(3 * GROUP, 32, 2)
    back = fmt.unpack(tensors, torch.float32)
    for h in range(2):
        for g in range(3):
            tokens = slice(g * GROUP, (g + 1) * GROUP)
            want, widest = by_loops(x[0, h, tokens].numpy(), boost)
            # scales and zeros are rounded to fp16; another code differs by a step
            step = scale[0, h, g].abs().amax().item()
            np.testing.assert_allclose(back[0, h, tokens].numpy(), want, rtol=0, atol=step / 4)
            near = np.abs(back[0, h, tokens].double().numpy() - want) < 5e-3 * step + 1e-3
            assert near.mean() > 0.95
            varied = [c for c in widest if x[0, h, tokens, c].unique().numel() > 1]
            assert (scale[0, h, g] < 0).nonzero().flatten().tolist() == sorted(varied)
            assert 5 in varied


def test_a_group_by_hand():
    """Channels 0 and 1 vary and have 4 bits; constant ones are never boosted."""
    x = torch.zeros(1, 1, GROUP, 9)
    x[..., 0] = torch.arange(16.0)
    x[..., 1] = torch.arange(16.0) % 4
    packed, scale, _ = Kitty(8, GROUP, GROUP).pack(x)
    codes = unpack_codes(packed, 2, GROUP)
    assert codes[0, 0, :, 0].tolist() == [i // 4 for i in range(16)]
    assert codes[0, 0, :, 9].tolist() == [i % 4 for i in range(16)]  # the low bits of channel 0
    torch.testing.assert_close(
        scale[0, 0, 0, :3].float(), torch.tensor([-4.0, -0.8, 0.0]), rtol=1e-3, atol=0
    )
    assert (codes[0, 0, 3, 1] * 4 + codes[0, 0, 3, 10]).item() == 15


def test_padding_enters_no_range():
    x, live = torch.randn(1, 2, GROUP, 16), torch.rand(1, 1, GROUP) > 0.4
    fmt = Kitty(4, GROUP, GROUP)
    with_zeros, with_large = (
        fmt.pack(torch.where(live.unsqueeze(-1), x, filler), live) for filler in (0.0, 1e3)
    )
    assert torch.equal(with_zeros[1], with_large[1])
    assert torch.equal(with_zeros[2], with_large[2])


def test_numbers_up_to_the_largest_come_back():
    fmt = Kitty(4, GROUP, GROUP)
    x = fmt.max_abs * torch.randint(0, 2, (1, 2, GROUP, 16)).mul(2).sub(1)
    back = fmt.unpack(fmt.pack(x), torch.float32)
    torch.testing.assert_close(back, x, rtol=2e-3, atol=0)
    assert fmt.pack(1.01 * x)[2].isinf().any()


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(RecipeError, match="unit=6 must be a multiple of 4 tokens, and residual=12"):
        Kitty(unit=6, residual=12)
    (problem,) = resolve("kitty:boost=64").problems(Geometry(1, 4, 2, 64, torch.float32))
    assert "boost=64 is not from 0 to 63, fewer than head_dim" in problem
