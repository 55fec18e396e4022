"""kernels.quantize.hadamard: rotation, Lloyd and Max's levels, and the norm that is kept."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from kvloom.encoding import META
from kvloom.kernels.quantize.hadamard import (
    dequantize_rotated,
    levels,
    quantize_rotated,
    rotate,
    unrotate,
)
from kvloom.store import Packed

BITS = (1, 1.5, 2, 3, 4, 8)
# Max (1960), table I: levels of the optimum quantizer of the normal distribution, and its error
TABLE = {
    1: ([0.7980], 0.3634),
    1.5: ([0.0, 1.2240], 0.1902),
    2: ([0.4528, 1.5100], 0.1175),
    3: ([0.2451, 0.7560, 1.3440, 2.1520], 0.03454),
    4: ([0.1284, 0.3881, 0.6568, 0.9424, 1.2560, 1.6180, 2.0690, 2.7330], 0.009497),
}


@pytest.mark.parametrize("bits", TABLE)
def test_levels_are_those_of_max(bits):
    found = levels(bits)
    upper = found[found >= 0].numpy()
    np.testing.assert_allclose(upper, TABLE[bits][0], atol=1e-3)
    assert torch.equal(found, -found.flip(0))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_rotations_are_orthogonal_and_spread_a_single_channel(dim):
    r = rotate(torch.eye(dim)).T
    torch.testing.assert_close(r @ r.T, torch.eye(dim), rtol=0, atol=1e-5)
    odd = dim & (dim - 1) != 0
    assert r.abs().max() <= (math.sqrt(2) if odd else 1) * 1.0001 / math.sqrt(dim)
    x = torch.randn(3, dim)
    torch.testing.assert_close(unrotate(x), x @ r, rtol=0, atol=1e-5)
    assert torch.equal(rotate(x)[1:2], rotate(x[1:2]))


@pytest.mark.parametrize(("dim", "group"), [(64, 64), (128, 32), (80, 80), (256, 256)])
def test_the_norm_of_every_vector_is_kept(subtests, dim, group):
    for bits, (meta, dtype) in itertools.product(BITS, META.items()):
        with subtests.test(bits=bits, meta=meta):
            x = torch.randn(2, 3, 5, dim) * torch.logspace(-1, 1, dim)
            codes, scale = quantize_rotated(x, bits, group, dtype)
            assert codes.shape == x.shape
            assert scale.shape == (2, 3, 5, dim // group)
            back = dequantize_rotated(codes, scale, bits, group)
            norms = (y.unflatten(-1, (-1, group)).norm(dim=-1) for y in (back, x))
            torch.testing.assert_close(*norms, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=0)


@pytest.mark.parametrize("bits", TABLE)
def test_the_error_is_the_tables_whatever_the_channels_are(bits):
    """Squared error over squared norm; one outlier channel in 128 changes nothing."""
    x = torch.randn(1, 1, 400, 128)
    for spoilt in (x, x + 50 * torch.eye(128)[7]):
        codes, scale = quantize_rotated(spoilt, bits, 128, torch.float32)
        off = dequantize_rotated(codes, scale, bits, 128) - spoilt
        error = (off.square().sum() / spoilt.square().sum()).item()
        # keeping the norm costs up to a factor 2 / (1 + sqrt(1 - e)) over the least error e
        e = TABLE[bits][1]
        kept = 2 - 2 * math.sqrt(1 - e)
        if spoilt is x:
            assert error == pytest.approx(kept, rel=0.05)
        assert error < 1.5 * kept


def test_codes_are_the_nearest_levels():
    x = torch.randn(1, 2, 9, 64)
    codes, _ = quantize_rotated(x, 3, 64, torch.float16)
    turned = rotate(x)
    unit = turned / turned.norm(dim=-1, keepdim=True) * 8
    nearest = (unit.unsqueeze(-1) - levels(3)).abs().argmin(-1)
    assert torch.equal(codes.long(), nearest)


@pytest.mark.parametrize("meta", META)
def test_zero_vectors_and_tiny_ones_stay_finite(subtests, meta):
    x = torch.zeros(1, 1, 3, 32)
    x[..., 1, :], x[..., 2, 5] = 1e-30, 1e-4
    for bits in BITS:
        with subtests.test(bits=bits):
            codes, scale = quantize_rotated(x, bits, 32, META[meta])
            back = dequantize_rotated(codes, scale, bits, 32)
            assert torch.isfinite(back).all()
            assert not back[:, :, 0].any()
            assert back.abs().max() < 0.02


@pytest.mark.parametrize("meta", META)
def test_the_largest_numbers_let_in_do_not_overflow_the_scale(subtests, meta):
    signs = torch.stack([torch.ones(32), *rotate(torch.eye(32)).T.sign()[:3]])[None, None]
    for bits in BITS:
        with subtests.test(bits=bits):
            x = Packed(bits, "token", 32, meta, rotation="group").max_abs * signs
            codes, scale = quantize_rotated(x, bits, 32, META[meta])
            back = dequantize_rotated(codes, scale, bits, 32)
            assert torch.isfinite(back).all()
            assert 0 < back.norm() <= 1.1 * x.norm()
