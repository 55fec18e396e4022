"""kernels.attend.triton.prompt against the reference, in Triton's interpreter.

The interpreter must be asked for before Triton is imported, so pytest runs this file once more.
bf16 is left out: the interpreter multiplies it wrongly.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import interpreter
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend import reference as ref

FP32, FP16 = torch.float32, torch.float16
SHAPES = {  # T, N, Hq, Hk, D, dtype
    "odd width": (20, 50, 3, 1, 33, FP16),
    "prompt": (41, 41, 2, 1, 48, FP32),
    "second turn": (70, 101, 6, 2, 64, FP16),
    "wide heads": (33, 40, 2, 2, 256, FP16),
    "one query": (1, 65, 4, 2, 16, FP32),
}


def drawn(shape):
    """Queries, keys and values of a named shape; the layouts are a model's."""
    t, n, hq, hk, d, dtype = SHAPES[shape]
    g = torch.Generator().manual_seed(n)

    def of(heads, tokens):
        return torch.randn(2, tokens, heads, d, generator=g).to(dtype).transpose(1, 2)

    return of(hq, t), of(hk, n), of(hk, n)


def masks(q, k):
    """What a case may hide."""
    b, hk, n = k.shape[:3]
    g = torch.Generator().manual_seed(3)
    each_head = torch.rand(b, hk, n, generator=g) > 0.4
    each_head[1, 0] = False  # its queries see nothing
    return {
        "plain": None,
        "padding": torch.arange(n) >= torch.tensor([0, n // 3])[:, None, None],
        "of all rows": (torch.rand(1, 1, n, generator=g) > 0.5).expand(b, -1, -1),
        "each head sees its own": each_head,
        "of some tokens": (torch.rand(b, 1, 2 * n, generator=g) > 0.3)[..., ::2],
    }


def by_kernel(q, k, v, scale, **options):
    """Attend by the kernel, which must cover the case."""
    with dispatch.use("gpu"):
        bound = ops.attend_prompt.choose(q, k, v, scale, **options)
        assert bound.backend == "gpu"
        return bound.run(q, k, v, scale, **options)


if interpreter.INTERPRETED:

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_attention_is_the_references(shape, causal):
        q, k, v = drawn(shape)
        exact = q.dtype == FP32
        for name, visible in masks(q, k).items():
            options = {"causal": causal, "visible": visible}
            got = by_kernel(q, k, v, 0.2, **options)
            want = ref.attend_prompt(q, k, v, 0.2, **options)
            assert got.out.dtype == q.dtype
            close = {"rtol": 1e-5, "atol": 1e-5} if exact else {"rtol": 2e-3, "atol": 2e-3}

            def said(differs, name=name):
                return f"{name}: {differs}"

            torch.testing.assert_close(got.out.float(), want.out, msg=said, **close)
            torch.testing.assert_close(got.lse, want.lse, rtol=1e-4, atol=1e-5, msg=said)

    def test_memory_layout_changes_nothing():
        q, k, v = drawn("second turn")
        want = by_kernel(q, k, v, 0.2)
        for layout in (
            lambda x: x.contiguous(),
            lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
            lambda x: F.pad(x, (0, 1))[..., :-1],
        ):
            assert torch.equal(by_kernel(layout(q), layout(k), layout(v), 0.2).out, want.out)

    def test_large_logits_do_not_overflow():
        q, k, v = drawn("prompt")
        got, want = (f(300 * q, 40 * k, v, 1.0) for f in (by_kernel, ref.attend_prompt))
        torch.testing.assert_close(got.out, want.out, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=0)

    def test_a_key_that_is_nan_gives_nan():
        q, k, v = drawn("prompt")
        k[0, 0, 3, 5] = torch.nan
        got = by_kernel(q, k, v, 0.2, causal=False)
        assert got.lse[0].isnan().all()
        assert got.out[0].isnan().all()
        assert got.lse[1].isfinite().all()

    def test_other_cases_are_left_to_the_reference(subtests):
        q, k, v = drawn("prompt")
        wide = [torch.zeros(2, 1, 5, 300)] * 3
        for what, case, visible in (
            ("head_dim", (q, k, v[..., :16]), None),
            ("head_dim", wide, None),
            ("keys torch.float16", (q, k.half(), v), None),
            ("float64", (q.double(), k.double(), v.double()), None),
            ("rows", (q, k[:1], v[:1]), None),
            ("a mask for 2 rows and 2 heads", (q, k, v), torch.ones(2, 2, 41, dtype=torch.bool)),
            ("a mask for 1 rows", (q, k, v), torch.ones(1, 1, 41, dtype=torch.bool)),
            ("gradient", (q.clone().requires_grad_(), k, v), None),
            ("gradient", (q, k, v.clone().requires_grad_()), None),
        ):
            with subtests.test(what), dispatch.use("gpu"):
                bound = ops.attend_prompt.choose(*case, 0.1, visible=visible)
                assert bound.kernel is None
                assert what in bound.why

    def test_no_query_and_no_key():
        q, k, v = drawn("prompt")
        assert by_kernel(q[:, :, :0], k, v, 0.1).out.shape == (2, 2, 0, 48)
        none = by_kernel(q, k[:, :, :0], v[:, :, :0], 0.1, causal=False)
        assert not none.out.any()
        assert none.lse.isneginf().all()

else:

    @pytest.mark.slow
    def test_in_the_interpreter():
        interpreter.run(__file__)
