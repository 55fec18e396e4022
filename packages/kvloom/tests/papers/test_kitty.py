"""Kitty (arXiv:2511.18643): numbers by hand, the definition by loops, and exact bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvloom.errors import RecipeError
from kvloom.kernels.quantize import reference as ref
from kvloom.recipe.geometry import Geometry
from kvloom.recipe.resolve import resolve
from kvloom.store import Packed, Store

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
    x = torch.randn(1, 2, 3 * GROUP, 32, generator=torch.Generator().manual_seed(boost)).double()
    x[..., 5] *= 9
    x[..., 7] = 0.25  # constant: exact, and never boosted
    x[0, 0, :, 8:] = 1.0  # fewer channels than `boost` are not constant
    codes, scale, zero = ref.boosted(x, GROUP, boost, torch.float32)
    assert codes.shape == (1, 2, 3 * GROUP, 32 + boost)
    assert codes.max() <= 3
    back = ref.unboosted(codes, scale, zero, GROUP, boost)
    for h in range(2):
        for g in range(3):
            here = slice(g * GROUP, (g + 1) * GROUP)
            want, wide = by_loops(x[0, h, here].numpy(), boost)
            np.testing.assert_allclose(back[0, h, here].numpy(), want, rtol=0, atol=1e-5)
            varied = [c for c in wide if x[0, h, here, c].unique().numel() > 1]
            assert (scale[0, h, g] < 0).nonzero().flatten().tolist() == sorted(varied)
            assert 5 in varied


def test_a_group_by_hand():
    """Channels 0 and 1 vary and have 4 bits; constant ones are never boosted."""
    x = torch.zeros(1, 1, GROUP, 9)
    x[..., 0] = torch.arange(16.0)
    x[..., 1] = torch.arange(16.0) % 4
    codes, scale, _ = ref.boosted(x, GROUP, 8, torch.float32)
    assert codes[0, 0, :, 0].tolist() == [i // 4 for i in range(16)]
    assert codes[0, 0, :, 9].tolist() == [i % 4 for i in range(16)]  # the low bits of channel 0
    torch.testing.assert_close(scale[0, 0, 0, :3], torch.tensor([-4.0, -0.8, 0.0]))
    assert (codes[0, 0, 3, 1] * 4 + codes[0, 0, 3, 10]).item() == 15


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(RecipeError, match="boost=16 gives channels of 2 bits two more; use bits=2"):
        Packed(2, "token", 16, boost=16)
    with pytest.raises(RecipeError, match="use boost for keys alone"):
        Store(values=Packed(2, "channel", 16, residual=16, boost=16))
    (problem,) = resolve("kitty:boost=64").problems(Geometry(1, 4, 2, 64, torch.float32))
    assert "boost=64 leaves no channel of head_dim=64 at 2 bits; use 0 or 8 or 16 or 32" in problem
