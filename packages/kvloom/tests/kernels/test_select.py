"""Clusters, pages and gathering against float64 loops, and the laws they obey."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
from kvloom.kernels.quantize import reference as quant
from kvloom.kernels.select import reference as ref

B, HK, D = 2, 2, 8


def keys(tokens: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, HK, tokens, D, generator=g)


def everything(tokens: int) -> torch.Tensor:
    return torch.ones(B, 1, tokens, dtype=torch.bool)


@pytest.mark.parametrize("distance", ref.DISTANCES)
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_kmeans_is_the_loop(distance, iterations):
    x, start = keys(90), torch.tensor([3, 20, 21, 50, 77, 80]).expand(B, 1, -1)
    alive = torch.ones(B, 1, 6, dtype=torch.bool)
    centroids, labels = ref.kmeans(x, start, everything(90), alive, distance, iterations)
    for b in range(B):
        for h in range(HK):
            want = naive.kmeans(x[b, h].double().numpy(), start[b, 0], distance, iterations)
            np.testing.assert_array_equal(labels[b, h], want[1])
            np.testing.assert_allclose(centroids[b, h], want[0], atol=1e-6)


def test_a_cluster_without_keys_keeps_its_centroid():
    x = keys(40)
    x[:, :, 7] = 1e-3  # by inner product, others are nearer to everything
    alive = torch.ones(B, 1, 2, dtype=torch.bool)
    x[:, :, 0] = 100.0
    x = x.abs()
    start = torch.tensor([7, 0]).expand(B, 1, -1)
    centroids, labels = ref.kmeans(x, start, everything(40), alive, "inner", 5)
    assert (labels == 1).all()
    torch.testing.assert_close(centroids[:, :, 0], x[:, :, 7])
    assert ref.sizes(labels, 2).tolist() == [[[0, 40]] * HK] * B


def test_hidden_tokens_and_dead_clusters_take_no_part():
    x, real = keys(40), everything(40)
    real[1, :, :25] = False
    alive = torch.tensor([[[True, True, True]], [[True, True, False]]])
    start = torch.tensor([[[1, 9, 30]], [[27, 33, 25]]])
    centroids, labels = ref.kmeans(x, start, real, alive, "cosine", 20)
    other = x.clone()
    other[1, :, :25] = 1e4
    again, _ = ref.kmeans(other, start, real, alive, "cosine", 20)
    assert (labels[1, :, :25] == 3).all()
    assert (labels[1, :, 25:] < 2).all()
    assert torch.equal(centroids, again)
    want = naive.kmeans(x[1, 0, 25:].double().numpy(), [2, 8], "cosine", 20)
    np.testing.assert_array_equal(labels[1, 0, 25:], want[1])


@given(st.lists(st.integers(0, 60), min_size=B, max_size=B), st.integers(1, 12))
def test_seeds_are_distinct_real_tokens_and_do_not_see_padding(pads, most):
    real = torch.arange(61) >= torch.tensor(pads)[:, None, None]
    count = real.sum(dim=-1).clamp(max=most)
    found = ref.seeds(real, count, most, torch.Generator().manual_seed(3))
    for row, pad in enumerate(pads):
        mine = found[row, 0, : count[row, 0]]
        assert (mine >= pad).all()
        assert len(set(mine.tolist())) == len(mine)
        alone = ref.seeds(
            torch.ones(1, 1, 61 - pad, dtype=torch.bool),
            count[row : row + 1],
            most,
            torch.Generator().manual_seed(3),
        )
        assert torch.equal(mine - pad, alone[0, 0, : len(mine)])


@given(st.integers(0, 999), st.integers(1, 60), st.sampled_from([1, 3]))
def test_exactly_m_tokens_of_the_best_clusters(seed, m, r):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 9, (B, HK, 60), generator=g)  # some of 12 clusters are empty
    scores = torch.randn(B, HK * r, 12, generator=g)
    size = ref.sizes(labels, 12)
    order = labels.argsort(dim=-1, stable=True)
    chosen = ref.select_clusters(scores, size, size.cumsum(-1) - size, order, m)
    assert chosen.shape == (B, HK * r, m)
    for b in range(B):
        for h in range(HK * r):
            want = naive.select_clusters(scores[b, h].numpy(), labels[b, h // r].numpy(), m)
            assert chosen[b, h].tolist() == want
            assert len(set(want)) == m


@given(st.integers(0, 999), st.sampled_from([1, 5, 16]), st.sampled_from([1, 3]))
def test_a_pages_bound_is_never_below_its_keys(seed, page, r):
    x, g = keys(page * 4, seed), torch.Generator().manual_seed(seed)
    q = torch.randn(B, HK * r, D, generator=g)
    low, high = ref.page_bounds(x, page, everything(page * 4))
    bound = ref.page_scores(q, low, high, "each")
    dots = ref.dots(q, x).view(B, HK * r, 4, page)
    assert (dots <= bound.unsqueeze(-1) + 1e-5).all()
    if page == 1:
        torch.testing.assert_close(bound, dots[..., 0])
    want = naive.page_score(q[1, 0].double().numpy(), x[1, 0, :page].double().numpy())
    assert abs(bound[1, 0, 0].item() - want) < 1e-5


def test_padding_widens_no_bound_and_an_empty_page_is_last():
    x, real = keys(32), everything(32)
    real[1, :, :20] = False
    litter = torch.where(real.unsqueeze(-1), x, 1e3)
    low, high = ref.page_bounds(litter, 16, real)
    scores = ref.page_scores(torch.ones(B, HK, D), low, high, "each")
    assert (scores[1, :, 0] == -torch.inf).all()
    torch.testing.assert_close(high[1, :, 1], x[1, :, 20:].amax(dim=1))
    torch.testing.assert_close(low[1, :, 1], x[1, :, 20:].amin(dim=1))
    assert not scores.isnan().any()


@pytest.mark.parametrize("bits", sorted(quant.PACK_BLOCK))
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("r", [1, 2])
def test_gathering_packed_tokens_is_unpacking_all_of_them(bits, axis, r):
    g = torch.Generator().manual_seed(int(2 * bits))
    x = torch.randn(B, HK, 96, 32, generator=g)
    meta = torch.float8_e4m3fn if bits == 1.5 else torch.float16
    codes, scale, zero = quant.quantize(x, bits, axis, 16, meta)
    slots = torch.randint(0, 96, (B, HK * r, 41), generator=g)
    got = ref.gather_packed(
        quant.pack_codes(codes, bits), scale, zero, bits, axis, 16, slots, torch.float32
    )
    exact = quant.dequantize(codes, scale, zero, axis, 16)
    assert torch.equal(got, ref.gather(exact, slots))
    for b, h in ((0, 0), (1, HK * r - 1)):
        assert torch.equal(got[b, h], exact[b, h // r][slots[b, h]])
