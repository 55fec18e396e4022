"""Pages: bounds of real keys only. Padding is found last. All channels are the exact top k."""

from __future__ import annotations

import torch

from kvloom.recall import Pages, PartialKeys, TopK

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
    for index, most in ((Pages(4), 8), (TopK(), 10), (PartialKeys(0.5), 10)):
        finder = index.finder()
        finder.extend(keys(), REAL)
        found = finder.find(q, most, "mean", keys)
        assert found.shape == (B, HK, most)
        assert (found[1] >= (4 if isinstance(index, Pages) else 6)).all()


def test_with_all_channels_partial_keys_find_the_exact_top_k():
    g = torch.Generator().manual_seed(0)
    q, new = (torch.randn(B, 2 * HK, n, D, generator=g) for n in (N, 1))
    k, real = torch.randn(B, HK, N, D, generator=g), torch.ones(B, 1, N, dtype=torch.bool)
    found = []
    for index in (TopK(), PartialKeys(1.0)):
        finder = index.finder()
        finder.learn(q, k, real, real)
        finder.extend(k, real)
        found.append(finder.find(new[:, :, 0], 5, "each", lambda: k).sort(dim=-1).values)
    assert torch.equal(*found)


def test_few_queries_rotate_nothing():
    """Fewer rows than channels leave directions without any query."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 3, D, generator=g), torch.randn(1, 1, N, D, generator=g)
    real = torch.ones(1, 1, N, dtype=torch.bool)
    finder = PartialKeys(0.25).finder()
    finder.learn(q, k, real, real[..., :3])
    assert finder.rotation.shape == (1, 1, D, 4)
    mass = q.abs().sum(dim=(0, 1, 2)) + k.abs().sum(dim=(0, 1, 2))
    best = mass.topk(4).indices.sort().values
    assert torch.equal(finder.rotation[0, 0], torch.eye(D)[:, best])
