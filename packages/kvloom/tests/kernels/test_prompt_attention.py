"""kernels.attend.cpu.prompt against float64: any shape, mask, layout and number of threads."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from kv_views import draw
from kvloom.kernels import dispatch, ops, simd
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.cpu import prompt
from kvloom.kernels.score.arguments import PAIRS, TILES

BF16 = torch.bfloat16


@pytest.fixture(params=[PAIRS, TILES], ids=["pairs", "tiles"])
def unit(monkeypatch, request) -> None:
    """Run the kernel that multiplies pairs or tiles, if the machine does."""
    has = simd.has_tiles() if request.param == TILES else simd.has_pairs()
    if not has:
        pytest.skip("no AVX-512 BF16, or no AMX")
    monkeypatch.setattr(simd, "has_tiles", lambda: request.param == TILES)
    monkeypatch.setattr(prompt, "compiled", cache(prompt.compiled.__wrapped__))


needs_kernel = pytest.mark.usefixtures("unit")


def drawn(b, hq, hk, t, n, d, seed=0):
    """Queries, keys and values with NaN around."""
    shapes = (b, hq, t, d), (b, hk, n, d), (b, hk, n, d)
    return [draw(shape, 3 * seed + i, BF16) for i, shape in enumerate(shapes)]


def agrees(q, k, v, scale, **options):
    got = prompt.attend(q, k, v, scale, **options)
    want = ref.attend_exact(q.double(), k.double(), v.double(), scale, causal=True, **options)
    assert got.out.dtype == BF16
    # weights and the result are rounded to bf16
    torch.testing.assert_close(got.out.double(), want.out.double(), rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(got.lse, want.lse.float(), rtol=1e-5, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize(("hq", "hk"), [(1, 1), (4, 2), (6, 2), (4, 4)])
def test_any_shape(subtests, hq, hk):
    shapes = [(1, 1, 32), (9, 9, 64), (48, 48, 96), (49, 130, 32), (200, 200, 128), (13, 300, 64)]
    for t, n, d in shapes:
        with subtests.test(t=t, n=n, d=d):
            agrees(*drawn(2, hq, hk, t, n, d, seed=t), d**-0.5)


@needs_kernel
@pytest.mark.parametrize("heads", [1, 2])
def test_hidden_keys_take_no_part(heads):
    q, k, v = drawn(3, 4, 2, 150, 170, 32)
    visible = torch.rand(3, heads, 170, generator=torch.Generator().manual_seed(1)) > 0.3
    visible[1] = False  # nothing is seen
    visible[2, :, :60] = False  # padding
    agrees(q, k, v, 0.2, visible=visible)
    hidden = ~visible.expand(-1, 2, -1)[..., None]
    want = prompt.attend(q, k, v, 0.2, visible=visible)
    got = prompt.attend(q, k.masked_fill(hidden, 3e4), v, 0.2, visible=visible)
    assert torch.equal(got.out, want.out)


@needs_kernel
def test_huge_logits_neither_overflow_nor_lose_the_winner():
    q, k, v = drawn(1, 4, 2, 100, 300, 32)
    q, k = (q * 100).round(), (k * 40).round()
    assert (q @ k.repeat_interleave(2, dim=1).mT).abs().max() > 5e4
    agrees(q, k, v, 1.0)


@needs_kernel
def test_memory_layout_and_threads_change_nothing():
    q, k, v = drawn(2, 4, 2, 384, 384, 64)
    want = prompt.attend(q, k, v, 0.1)
    for layout in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
        lambda x: F.pad(x, (0, 1))[..., :-1],
    ):
        assert torch.equal(prompt.attend(layout(q), layout(k), layout(v), 0.1).out, want.out)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        got = prompt.attend(q, k, v, 0.1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_other_cases_are_left_to_the_reference(subtests):
    q, k, v = drawn(1, 2, 1, 20, 20, 32)
    for name, case in {
        "dtypes": (q, k.float(), v),
        "float64": (q.double(), k.double(), v.double()),
        "widths": (q, k, v[..., :24]),
        "gradient": (q.clone().requires_grad_(), k, v),
    }.items():
        with subtests.test(name), dispatch.use("auto"):
            bound = ops.attend_prompt.choose(*case, 0.1)
            assert bound.kernel is None
            assert bound.why


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float16, 2**-10), (BF16, 2**-8)]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("hq", "hk"), [(1, 1), (6, 2)])
def test_torch_attends_and_returns_the_lse(subtests, hq, hk, causal, dtype, rounding):
    g = torch.Generator().manual_seed(1)
    for t, n, d, heads in (
        (90, 90, 32, 0), (90, 150, 32, hk), (90, 90, 20, 1), (60, 150, 80, 0), (3, 2000, 64, 1),
    ):  # fmt: skip
        q, k, v = (x.to(dtype) for x in drawn(2, hq, hk, t, n, d))
        visible = None
        if heads:
            visible = torch.rand(2, heads, n, generator=g) > 0.3
            visible[1, 0] = False  # nothing is seen
            visible[0, :, : n - t + 5] = False  # padding
        options = {"causal": causal, "visible": visible}
        with subtests.test(t=t, n=n, d=d, heads=heads):
            got = prompt.fused(q, k, v, 0.2, **options)
            want = ref.attend_exact(q.double(), k.double(), v.double(), 0.2, **options)
            assert got.out.dtype == dtype
            exact = dtype == torch.float32
            error = rounding * (2 if causal and t < n and not exact else 1)  # of each of two parts
            atol, lse_atol = (1e-6, 1e-6) if exact else (error, 1e-4)
            torch.testing.assert_close(got.out, want.out.to(dtype), rtol=error, atol=atol)
            torch.testing.assert_close(got.lse, want.lse.float(), rtol=1e-5, atol=lse_atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_no_processor_leaves_a_prompt_to_the_reference(monkeypatch, dtype):
    monkeypatch.setattr(simd, "features", set)
    monkeypatch.setattr(ops.attend_prompt, "bindings", {})
    q, k, v = (x.to(dtype) for x in drawn(1, 4, 2, 20, 30, 64))
    with dispatch.use("auto"):
        assert ops.attend_prompt.choose(q, k, v, 0.2).kernel is prompt.fused
