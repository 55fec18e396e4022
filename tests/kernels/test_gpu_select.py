"""kernels.select.gpu against the reference in Triton's interpreter.

The interpreter must be asked for before Triton is imported, so pytest runs this file once more.
bf16 is left out: the interpreter multiplies it wrongly.
"""

from __future__ import annotations

import pytest
import torch

import interpreter
from kvloom.kernels import dispatch
from kvloom.kernels.select import gpu, ref, run

FP32, FP16 = torch.float32, torch.float16

if interpreter.INTERPRETED:

    @pytest.fixture(autouse=True)
    def _poisoned():
        """Memory that nobody has written is NaN, or the largest integer."""
        torch.use_deterministic_algorithms(True)
        yield
        torch.use_deterministic_algorithms(False)

    def keys(b, h, n, d, dtype, seed=0):
        g = torch.Generator().manual_seed(seed)
        return torch.randn(b, n, h, d, generator=g).to(dtype).transpose(1, 2)

    @pytest.mark.parametrize(
        ("distance", "n", "h", "d", "c", "dtype"),
        [
            ("cosine", 90, 2, 8, 6, FP32),
            ("cosine", 150, 1, 80, 70, FP16),
            ("l2", 90, 1, 48, 40, FP16),
            ("inner", 70, 2, 16, 9, FP32),
        ],
    )
    def test_clusters_are_the_references(distance, n, h, d, c, dtype):
        x, real = keys(2, h, n, d, dtype), torch.ones(2, 1, n, dtype=torch.bool)
        real[1, :, :20] = False
        start = (torch.randperm(n - 20)[:c].sort().values + 20).expand(2, 1, c)
        alive = torch.ones(2, 1, c, dtype=torch.bool)
        alive[1, :, -2:] = False
        for iterations in (1, 4):
            given = (x, start, real, alive, distance, iterations)
            (want, labels), (got, found) = ref.kmeans(*given), gpu.kmeans(*given)
            assert torch.equal(found, labels)
            torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
        near = [f.nearest(x, want, distance, alive) for f in (gpu, ref)]
        assert torch.equal(*near)

    def test_a_cluster_without_keys_stays_and_iterations_end():
        """By inner product all keys go to the largest; more iterations change nothing."""
        x = keys(1, 1, 40, 8, FP32).abs()
        x[:, :, 7], x[:, :, 0] = 1e-3, 100.0
        real, alive = torch.ones(1, 1, 40, dtype=torch.bool), torch.ones(1, 1, 2, dtype=torch.bool)
        start = torch.tensor([[[7, 0]]])
        centroids, labels = gpu.kmeans(x, start, real, alive, "inner", 9)
        assert (labels == 1).all()
        torch.testing.assert_close(centroids[:, :, 0], x[:, :, 7])
        torch.testing.assert_close(centroids[:, :, 1], x.mean(dim=2))

    @pytest.mark.parametrize("page", [1, 5, 16])
    @pytest.mark.parametrize("dtype", [FP32, FP16])
    def test_pages(page, dtype):
        x, real = keys(2, 2, 80, 48, dtype), torch.ones(2, 1, 80, dtype=torch.bool)
        real[1, :, :27] = False
        for mask in (real, None):
            want, got = (f.page_bounds(x, page, mask) for f in (ref, gpu))
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            q = keys(2, 6, 1, 48, dtype, seed=1)[:, :, 0]
            for group in ("each", "max", "mean"):
                a, b = (f.page_scores(q, *want, group) for f in (gpu, ref))
                torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(gpu.dots(q, x), ref.dots(q, x), rtol=1e-5, atol=2e-5)

    @pytest.mark.parametrize("r", [1, 3])
    def test_choices_are_the_references(r):
        g = torch.Generator().manual_seed(r)
        labels = torch.randint(0, 9, (2, 2, 300), generator=g)  # some of 12 clusters are empty
        size, order = ref.sizes(labels, 12), labels.argsort(dim=-1, stable=True)
        start = size.cumsum(-1) - size
        scores = torch.randn(2, 2 * r, 12, generator=g)
        scores[..., 3] = scores[..., 5]
        scores[..., -1] = -torch.inf
        for m in (1, 37, 299):
            got, want = (f.select_clusters(scores, size, start, order, m) for f in (gpu, ref))
            assert torch.equal(got, want)

    def test_they_are_chosen_where_they_are_asked_for():
        x, q = keys(1, 1, 32, 16, FP32), keys(1, 2, 1, 16, FP32)[:, :, 0]
        real = torch.ones(1, 1, 32, dtype=torch.bool)
        before = dispatch.ran.copy()
        with dispatch.use("gpu"):
            low, high = run.page_bounds(x, 8, real)
            scores = run.page_scores(q, low, high, "mean")
            pages = run.select_pages(scores, 2, 8)
        assert torch.equal(pages, ref.select_pages(ref.page_scores(q, low, high, "mean"), 2, 8))
        ran = {(operation, backend) for operation, backend, _ in dispatch.ran - before}
        assert ran == {("page_bounds", "gpu"), ("page_scores", "gpu"), ("select_pages", "ref")}

    def test_clusters_are_rated_as_the_reference_does():
        centroids, alive = keys(2, 2, 20, 32, FP32), torch.ones(2, 2, 20, dtype=torch.bool)
        alive[1, :, 4:] = False
        q = keys(2, 6, 1, 32, FP32, seed=1)[:, :, 0]
        for group in ("each", "max", "mean"):
            got, want = (f.cluster_scores(q, centroids, alive, group) for f in (gpu, ref))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

else:

    def test_in_the_interpreter():
        interpreter.run(__file__)

    def test_what_is_not_covered_is_said():
        said = gpu.problems(torch.zeros(1, 1, 9, 512), torch.zeros(1, 1, 512, dtype=FP16))
        for what in ("CUDA", "512", "float16"):
            assert any(what in s for s in said)
