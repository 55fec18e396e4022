"""kernels.attend.cpu.prompt against float64: any shape, mask, layout and number of threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.cpu import prompt

BF16 = torch.bfloat16
PROBLEMS = prompt.COVERAGE.problems(*[torch.zeros(1, 1, 1, 32, dtype=BF16)] * 3)
needs_kernel = pytest.mark.skipif(bool(PROBLEMS), reason="; ".join(PROBLEMS))


def drawn(b, hq, hk, t, n, d, seed=0):
    """Queries, keys and values with NaN before and behind."""
    g = torch.Generator().manual_seed(seed)
    tensors = []
    for heads, tokens in ((hq, t), (hk, n), (hk, n)):
        x = torch.full((b, heads + 1, tokens + 3, d), torch.nan, dtype=BF16)
        x[:, :heads, 1 : tokens + 1] = torch.randn(b, heads, tokens, d, generator=g)
        tensors.append(x[:, :heads, 1 : tokens + 1])
    return tensors


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


def test_other_cases_are_left_to_torch(subtests):
    q, k, v = drawn(1, 2, 1, 20, 20, 32)
    for name, case in {
        "fp16": (q.half(), k.half(), v.half()),
        "fp32 with tokens before": (q[:, :, 1:].float(), k.float(), v.float()),
        "head_dim": (q[..., :24], k[..., :24], v[..., :24]),
        "gradient": (q.clone().requires_grad_(), k, v),
    }.items():
        with subtests.test(name), dispatch.use("auto"):
            bound = ops.attend_prompt.choose(*case, 0.1)
            assert bound.kernel is None
            assert bound.why


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("hq", "hk"), [(1, 1), (6, 2)])
def test_torch_attends_in_fp32_and_returns_the_lse(hq, hk, causal):
    q, k, v = (x.float() for x in drawn(2, hq, hk, 90, 90 if causal else 150, 32))
    visible = None
    if not causal:
        visible = torch.rand(2, hk, 150, generator=torch.Generator().manual_seed(1)) > 0.3
        visible[1, 0] = False  # nothing is seen
    options = {"causal": causal, "visible": visible}
    with dispatch.use("auto"):
        assert ops.attend_prompt.choose(q, k, v, 0.2, **options).kernel is prompt.fused
        got = ops.attend_prompt(q, k, v, 0.2, **options)
    want = ref.attend_exact(q.double(), k.double(), v.double(), 0.2, **options)
    torch.testing.assert_close(got.out, want.out.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.lse, want.lse.float(), rtol=1e-5, atol=1e-6)
