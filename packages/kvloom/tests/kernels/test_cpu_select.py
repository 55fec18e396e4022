"""kernels.select.cpu against the reference and float64 loops: ties, padding, empty clusters.

Kernels are compiled for a head dimension and a dtype, so these are few and all else is drawn.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
from kvloom.kernels import dispatch, ops
from kvloom.kernels.select import cpu
from kvloom.kernels.select import reference as ref

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
D = 32
GROUPS = ("mean", "max", "turns", "each")


def draw(b, h, n, seed=0, dtype=FP32):
    """Random numbers with NaN before, behind and between, channels side by side."""
    x = torch.full((b, h + 1, n + 3, D), torch.nan, dtype=dtype)
    x[:, :h, 1 : n + 1] = torch.randn(b, h, n, D, generator=torch.Generator().manual_seed(seed))
    return x[:, :h, 1 : n + 1]


def some(*shape, share=0.9, seed=0):
    """A mask that is True for most."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


# --- k-means -------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", ref.DISTANCES)
@pytest.mark.parametrize("iterations", [1, 3, 20])
def test_kmeans_is_the_loop(distance, iterations):
    x, start = draw(2, 2, 200), torch.tensor([3, 20, 21, 50, 77, 180]).expand(2, 1, -1)
    alive, real = torch.ones(2, 1, 6, dtype=torch.bool), torch.ones(2, 1, 200, dtype=torch.bool)
    centroids, labels = cpu.kmeans(x, start, real, alive, distance, iterations)
    for b in range(2):
        for h in range(2):
            want = naive.kmeans(x[b, h].double().numpy(), start[b, 0], distance, iterations)
            np.testing.assert_array_equal(labels[b, h], want[1])
            np.testing.assert_allclose(centroids[b, h], want[0], atol=2e-6)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@given(
    st.integers(0, 300),
    st.integers(1, 100),
    st.sampled_from(ref.DISTANCES),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_the_nearest_centroid_is_nearest(dtype, n, c, distance, b, seed):
    x, centroids = draw(b, 2, n, seed, dtype), draw(b, 2, c, seed + 1).contiguous()
    alive = some(b, 1, c, share=0.8, seed=seed)
    alive[:, :, -1] = True
    labels = cpu.nearest(x, centroids, distance, alive)
    assert labels.dtype == torch.long
    weights, offset = ref.linear(centroids, distance, alive, dtype)
    rated = x.double() @ weights.double().transpose(-1, -2) + offset.double().unsqueeze(2)
    best = rated.amax(dim=-1)
    near = rated.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(near, best, rtol=0, atol=1e-4)
    assert (labels == rated.argmax(dim=-1)).double().mean() > 0.99 or n < 100


def test_of_equal_centroids_the_first_is_nearest():
    x, centroids = draw(1, 1, 130), draw(1, 1, 7, 1).contiguous().repeat(1, 1, 13, 1)
    alive = torch.ones(1, 1, 91, dtype=torch.bool)
    first = cpu.nearest(x, centroids, "inner", alive)
    assert (first < 7).all()
    alive[..., :7] = False
    assert torch.equal(cpu.nearest(x, centroids, "inner", alive), first + 7)


@given(st.integers(0, 200), st.integers(1, 40), st.integers(0, 99))
def test_means_are_those_of_the_reference(n, c, seed):
    x, old = draw(2, 2, n, seed), draw(2, 2, c, seed + 1).contiguous()
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, c + 1, (2, 2, n), generator=g)  # c: takes no part
    labels[labels == 3] = 0  # a cluster without keys
    got = cpu.means(x, labels, old)
    torch.testing.assert_close(got, ref.means(x, labels, old), rtol=0, atol=1e-6)
    if c > 3:
        assert torch.equal(got[:, :, 3], old[:, :, 3])


def test_hidden_tokens_and_dead_clusters_take_no_part():
    x, real = draw(2, 2, 140).contiguous(), torch.ones(2, 1, 140, dtype=torch.bool)
    real[1, :, :105] = False
    alive = torch.tensor([[[True, True, True]], [[True, True, False]]])
    start = torch.tensor([[[1, 9, 30]], [[107, 133, 125]]])
    centroids, labels = cpu.kmeans(x, start, real, alive, "cosine", 20)
    other = x.clone()
    other[1, :, :105] = 1e4
    again, _ = cpu.kmeans(other, start, real, alive, "cosine", 20)
    assert (labels[1, :, :105] == 3).all()
    assert (labels[1, :, 105:] < 2).all()
    assert torch.equal(centroids, again)
    want = ref.kmeans(x, start, real, alive, "cosine", 20)
    assert torch.equal(labels, want[1])


def test_bf16_keys_meet_centroids_in_bf16():
    x, start = draw(1, 2, 250, 3, BF16), torch.arange(0, 250, 50).expand(1, 1, -1)
    real, alive = torch.ones(1, 1, 250, dtype=torch.bool), torch.ones(1, 1, 5, dtype=torch.bool)
    got, want = (kernel.kmeans(x, start, real, alive, "cosine", 1)[1] for kernel in (cpu, ref))
    assert (got == want).double().mean() > 0.98


# --- ratings and choice --------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
@given(
    st.integers(1, 150),
    st.sampled_from([(1, FP32), (3, FP32), (4, FP32), (3, FP16)]),
    st.integers(0, 99),
)
def test_clusters_are_rated_by_inner_product(group, c, form, seed):
    r, dtype = form
    q, centroids = draw(2, 2 * r, 1, seed)[:, :, 0], draw(2, 2, c, seed + 1, dtype)
    alive = some(2, 2, c, seed=seed)
    got = cpu.cluster_scores(q, centroids, alive, group)
    want = ref.cluster_scores(q, centroids, alive, group)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("group", GROUPS)
@given(
    st.integers(1, 150),
    st.sampled_from([(1, FP32), (2, FP32), (3, BF16)]),
    st.integers(0, 99),
)
def test_pages_are_rated_by_their_bounds(group, pages, form, seed):
    r, dtype = form
    q, x = draw(2, 2 * r, 1, seed)[:, :, 0], draw(2, 2, pages * 4, seed + 1, dtype)
    bounds = ref.page_bounds(x, 4, some(2, 1, pages * 4, share=0.7, seed=seed))
    got = cpu.page_scores(q, *bounds, group)
    torch.testing.assert_close(got, ref.page_scores(q, *bounds, group), rtol=0, atol=5e-5)


@given(st.integers(0, 999), st.integers(1, 400), st.sampled_from([1, 3]), st.booleans())
def test_exactly_m_tokens_of_the_best_clusters(seed, m, r, ties):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 190, (2, 2, 400), generator=g)  # some of 200 clusters are empty
    scores = torch.randn(2, 2 * r, 200, generator=g)
    scores = scores.round() if ties else scores
    scores = scores.masked_fill(~some(2, 1, 200, share=0.7, seed=seed), -torch.inf)
    size = ref.sizes(labels, 200)
    held = size.int(), (size.cumsum(-1) - size).int(), labels.argsort(dim=-1, stable=True).int()
    got = cpu.select_clusters(scores, *held, m)
    assert got.dtype == torch.long
    assert torch.equal(got, ref.select_clusters(scores, *held, m))


@given(
    st.integers(0, 999),
    st.integers(1, 400),
    st.integers(1, 4),
    st.sampled_from([5, 128, 300]),
    st.booleans(),
)
def test_heads_take_clusters_and_pages_in_turns(seed, m, r, c, ties):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, max(1, c - 2), (2, 2, 400), generator=g)
    scores = torch.randn(2, 2, r, c, generator=g)
    scores = scores.round() if ties else scores
    scores = scores.masked_fill(~some(2, 2, 1, c, share=0.7, seed=seed), -torch.inf)
    size = ref.sizes(labels, c)
    clusters = size.int(), (size.cumsum(-1) - size).int(), labels.argsort(dim=-1, stable=True).int()
    got = cpu.select_clusters(scores, *clusters, m)
    assert got.shape == (2, 2, m)
    assert torch.equal(got, ref.select_clusters(scores, *clusters, m))
    pages = 1 + m % c
    assert torch.equal(cpu.select_pages(scores, pages, 3), ref.select_pages(scores, pages, 3))


def test_every_head_takes_its_best_in_the_first_round():
    scores = torch.tensor([[[[5.0, 4, 3, 2, 1], [0, 9, 8, 2, 7]]]])
    for kernel in (ref, cpu):  # 0 and 1; 1 is taken, and 2; 2 is taken, and 4; 3
        assert kernel.select_pages(scores, 5, 1).flatten().tolist() == [0, 1, 2, 4, 3]
    by_turns = ref.reduce_query_heads(scores.view(1, 2, 5), 1, "turns")
    assert by_turns.argsort(descending=True).tolist() == [[[0, 1, 2, 4, 3]]]


@given(st.integers(0, 999), st.integers(1, 300), st.integers(1, 16), st.booleans())
def test_the_best_pages_whole_and_in_order(seed, pages, page, ties):
    g = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, pages, generator=g)
    scores = scores.round() if ties else scores
    scores = scores.masked_fill(~some(2, 1, pages, share=0.8, seed=seed), -torch.inf)
    for count in {1, pages // 2, pages} - {0}:
        want = ref.select_pages(scores, count, page)
        assert torch.equal(cpu.select_pages(scores, count, page), want)
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
        assert torch.equal(want[..., ::page], best * page)


@pytest.mark.parametrize("heads", [(), (2,)], ids=["alone", "turns"])
def test_more_pages_than_there_are_is_all_of_them(heads):
    scores = torch.randn(2, 1, *heads, 4)
    got = cpu.select_pages(scores, 6, 4)
    assert torch.equal(got, ref.select_pages(scores, 6, 4))
    assert got.sort().values.tolist() == [[list(range(16))]] * 2


def test_scores_need_not_lie_in_order():
    scores = torch.randn(2, 70, 3).transpose(1, 2)
    assert torch.equal(cpu.select_pages(scores, 9, 4), ref.select_pages(scores.contiguous(), 9, 4))


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("page", [1, 5, 16])
def test_bounds_of_pages_are_keys(dtype, page):
    for pages in (1, 63, 64, 65):
        x = draw(2, 2, pages * page, pages, dtype)
        for real in (None, some(2, 1, pages * page, share=0.6)):
            got, want = (kernel.page_bounds(x, page, real) for kernel in (cpu, ref))
            assert got[0].dtype == got[1].dtype == dtype
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("threads", [2, 5])
def test_several_threads_leave_no_seam(threads):
    before = torch.get_num_threads()
    x, q = draw(2, 2, 9600), draw(2, 4, 1, 5)[:, :, 0]
    alive = torch.ones(2, 2, 9600, dtype=torch.bool)
    starts = torch.arange(0, 9600, 480).expand(2, 1, -1)
    few = torch.ones(2, 1, 20, dtype=torch.bool)

    def everything():
        scores = cpu.cluster_scores(q, x, alive, "mean")
        bounds = cpu.page_bounds(x, 2, None)
        means = cpu.kmeans(x, starts, alive[:, :1], few, "cosine", 2)
        return scores, *bounds, *means, cpu.select_pages(scores, 50, 3)

    want = everything()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            assert all(torch.equal(*both) for both in zip(everything(), want, strict=True))
    finally:
        torch.set_num_threads(before)


# --- who runs ------------------------------------------------------------------------------------


def test_what_is_not_covered_is_said_and_left_to_the_reference():
    assert cpu.COVERAGE.problems(torch.zeros(1, 1, 3, 32)) == []
    said = cpu.COVERAGE.problems(torch.zeros(1, 1, 3, 40, dtype=torch.float64))
    assert said == [
        "head_dim=40 is not a multiple of 16, up to 512",
        "they are torch.float64, not fp32, fp16 or bf16",
    ]
    x, real = torch.randn(1, 2, 12, 40), torch.ones(1, 1, 12, dtype=torch.bool)
    q = torch.randn(1, 4, 40)
    dispatch.ran.clear()
    with dispatch.use("auto"):
        bounds = ops.page_bounds(x, 4, real)
        scores = ops.page_scores(q, *bounds, "mean")
        ops.select_pages(scores.double(), 2, 4)
        ops.kmeans(x, torch.tensor([[[0, 5]]]), real, real[..., :2], "cosine", 2)
        ops.cluster_scores(q, x, real.expand(1, 2, -1), "each")
    assert torch.equal(bounds[0], ref.page_bounds(x, 4, None)[0])
    assert all(backend == "ref" and why for _, backend, why in dispatch.ran)
    assert len(dispatch.ran) == 5
    with dispatch.use("auto"):
        ops.select_pages(scores, 2, 4)
    assert dispatch.ran["select_pages", "cpu", ""] == 1


def test_kernels_that_fail_to_compile_leave_their_cases_to_the_reference(monkeypatch):
    def fail(*_):
        raise RuntimeError("no compiler")

    q, keys, scores = torch.randn(1, 2, D), draw(1, 2, 8), torch.rand(1, 2, 5)
    alive, centroids = some(1, 2, 5), draw(1, 2, 5)
    order, size = torch.arange(5).expand(1, 2, 5), torch.ones(1, 2, 5, dtype=torch.int)
    calls = {
        "kmeans": (keys, torch.tensor([[[0, 3]]]), some(1, 1, 8, share=1), some(1, 1, 2, share=1),
                   "l2", 2),
        "page_bounds": (keys, 4, None),
        "cluster_scores": (q, centroids, alive, "max"),
        "page_scores": (q, centroids, centroids + 1, "max"),
        "select_clusters": (scores, size, order.int(), order.int(), 4),
        "select_pages": (scores, 2, 4),
    }  # fmt: skip
    for name in ("compiled_kmeans", "kernels"):
        monkeypatch.setattr(cpu, name, fail)
    for name, arguments in calls.items():
        op = ops.OPS[name]
        monkeypatch.setattr(op, "bindings", {})
        with dispatch.use("auto"), pytest.warns(UserWarning, match="no compiler; the reference"):
            got = op(*arguments)
        want = getattr(ref, name)(*arguments)
        for x, y in zip(*(z if isinstance(z, tuple) else (z,) for z in (got, want)), strict=True):
            assert torch.equal(x, y)
