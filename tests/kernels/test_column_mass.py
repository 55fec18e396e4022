"""column_mass against the full softmax in float64."""

import numpy as np
import pytest
import torch

from kvloom.kernels.score import ref
from kvloom.kernels.score.noise import Noise


def naive(q, k, scale, valid, real, softcap, extra, tau):
    b, hq, t, _ = q.shape
    hk, n = k.shape[1], k.shape[2]
    mass = np.zeros((b, hq, n))
    for row in range(b):
        for h in range(hq):
            for i in range(t):
                if real is not None and not real[row, 0, i]:
                    continue
                x = k[row, h * hk // hq].astype(np.float64) @ q[row, h, i].astype(np.float64)
                x = x * scale
                if softcap is not None:
                    x = np.tanh(x / softcap) * softcap
                x = (
                    x + extra[row if extra.shape[0] > 1 else 0, h, i if extra.shape[2] > 1 else 0]
                ) / tau
                see = np.arange(n) <= n - t + i
                if valid is not None:
                    see &= valid[row, h * hk // hq if valid.shape[1] > 1 else 0]
                if see.any():
                    e = np.where(see, np.exp(x - x[see].max()), 0.0)
                    mass[row, h] += e / e.sum()
    return mass


@pytest.mark.parametrize(("hq", "hk"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(("t", "n"), [(1, 1), (1, 65), (17, 17), (5, 64)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("tau", [1.0, 1.7])
def test_equals_the_full_softmax(hq, hk, t, n, softcap, tau):
    g = torch.Generator().manual_seed(hq * 100 + n)
    q, k = torch.randn(2, hq, t, 16, generator=g), torch.randn(2, hk, n, 16, generator=g)
    valid = torch.rand(2, hk, n, generator=g) > 0.3
    real = torch.rand(2, 1, t, generator=g) > 0.3
    fixed, per_head = bool(t % 2), torch.rand(2, hk, n, generator=g).argsort(-1) + 9
    noise = Noise("gumbel", 5, per_head, first=9 + n - t, fixed=fixed)
    extra = noise.block(hk, hq // hk, 0, t, n).flatten(1, 2).numpy()
    mass = ref.column_mass(q, k, 0.4, valid=valid, real=real, softcap=softcap, noise=noise, tau=tau)
    expected = naive(q.numpy(), k.numpy(), 0.4, valid.numpy(), real.numpy(), softcap, extra, tau)
    np.testing.assert_allclose(mass.numpy(), expected, rtol=1e-4, atol=1e-6)


def test_rows_are_normalised_and_blocks_do_not_show(monkeypatch):
    q, k = torch.randn(1, 4, 50, 16), torch.randn(1, 2, 50, 16)
    whole = ref.column_mass(q, k, 0.25)
    torch.testing.assert_close(whole.sum(-1), torch.full((1, 4), 50.0))
    monkeypatch.setattr(ref, "_BLOCK_NUMEL", 1)
    torch.testing.assert_close(ref.column_mass(q, k, 0.25), whole)


@pytest.mark.parametrize("fixed", [False, True])
def test_blocks_do_not_show_in_noise(monkeypatch, fixed):
    q, k = torch.randn(3, 4, 50, 16), torch.randn(3, 2, 50, 16)
    noise = Noise("gumbel", 3, torch.arange(50)[None, None], 0, fixed)
    whole = ref.column_mass(q, k, 0.25, noise=noise)
    monkeypatch.setattr(ref, "_BLOCK_NUMEL", 1)
    torch.testing.assert_close(ref.column_mass(q, k, 0.25, noise=noise), whole)
