"""Pages: bounds of real keys only, and padding found last."""

from __future__ import annotations

import torch

from kvloom.recall import Pages, TopK

B, HK, N, D = 2, 2, 16, 16
REAL = torch.arange(N) >= torch.tensor([0, 6])[:, None, None]  # a page and a half of padding


def keys() -> torch.Tensor:
    """Keys above 0, as if padding, which is 0, were the least of all."""
    g = torch.Generator().manual_seed(0)
    return (torch.rand(B, HK, N, D, generator=g) + 1).masked_fill(~REAL[..., None], 0.0)


def test_padding_widens_no_bound():
    finder = Pages(4).finder()
    finder.extend(keys()[:, :, :8], REAL[..., :8])
    finder.extend(keys()[:, :, 8:], REAL[..., 8:])
    for page in range(4):
        for row, pad in enumerate((0, 6)):
            its = keys()[row, :, max(pad, 4 * page) : 4 * page + 4]
            if its.shape[1]:
                assert torch.equal(finder.low[row, :, page], its.amin(dim=1))
                assert torch.equal(finder.high[row, :, page], its.amax(dim=1))


def test_padding_is_found_last():
    """All products are negative, so those of padding, which are 0, would be the largest."""
    q = -torch.ones(B, HK, D)
    for index, most in ((Pages(4), 8), (TopK(), 10)):
        finder = index.finder()
        finder.extend(keys(), REAL)
        found = finder.find(q, most, "mean", keys)
        assert found.shape == (B, HK, most)
        assert (found[1] >= (4 if isinstance(index, Pages) else 6)).all()
