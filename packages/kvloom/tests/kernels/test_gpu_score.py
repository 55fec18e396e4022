"""kernels.score.triton against the reference in Triton's interpreter: relative error 1e-4 at most.

The interpreter must be asked for before Triton is imported, so pytest runs this file once more.
bf16 is left out: the interpreter multiplies it wrongly.
"""

from __future__ import annotations

import pytest
import torch

import interpreter
from kvloom.kernels import dispatch, ops
from kvloom.kernels.score import reference as ref
from kvloom.kernels.score import triton as gpu
from kvloom.kernels.score.noise import Noise

FP32, FP16 = torch.float32, torch.float16
SHAPES = {  # T, N, Hq, Hk, D, dtype
    "decode": (1, 65, 4, 2, 64, FP16),
    "draft": (3, 70, 6, 2, 80, FP32),
    "first tokens": (8, 8, 4, 1, 16, FP32),
    "prompt": (41, 41, 2, 1, 48, FP32),
    "second turn": (70, 101, 2, 1, 64, FP16),
}


def options(t, n, hq, hk, g):
    """What the named cases ask for."""
    visible = torch.arange(n) >= torch.tensor([0, n // 3])[:, None, None]
    some = torch.rand(2, hk, n, generator=g) > 0.3
    keys = torch.rand(2, hk, n, generator=g).argsort(-1) + 9
    bias = torch.randn(1, hq, n, generator=g)
    padded = {"visible": visible, "visible_queries": visible[..., -t:]}
    return {
        "plain": {},
        "padding": padded,
        "each head sees its own": {"visible": some},
        "softcap and bias": {"softcap": 5.0, "bias": bias},
        "noise": {"noise": Noise("gumbel", 3, keys, 11), "tau": 1.7},
        "fixed noise": {"noise": Noise("gumbel", 1, keys[:1, :1].int(), 1, True)},
        "noise of later heads": {"noise": Noise("gumbel", 3, keys, 11, head=5)},
        "constant": {"noise": Noise("constant", 3, keys, 11)},
        "largest": {"reduce_max": True, **padded},
        "other keys": {"other_lse": torch.randn(2, hq, t, generator=g), **padded},
        "largest, beside other keys": {
            "reduce_max": True, "other_lse": 3 * torch.randn(2, hq, t, generator=g), "softcap": 5.0,
        },
        "everything": {
            **padded, "softcap": 5.0, "bias": bias.expand(2, -1, -1), "tau": 0.8,
            "noise": Noise("gumbel", 2**31 + 5, keys, 2),
        },
    }  # fmt: skip


if interpreter.INTERPRETED:

    @pytest.mark.parametrize("shape", SHAPES)
    def test_mass_is_the_references(shape):
        t, n, hq, hk, d, dtype = SHAPES[shape]
        g = torch.Generator().manual_seed(t)
        q = torch.randn(2, t, hq, d, generator=g).to(dtype).transpose(1, 2)
        k = torch.randn(2, hk, n, d, generator=g).to(dtype)
        for name, given in options(t, n, hq, hk, g).items():
            got, want = (f.column_mass(q, k, d**-0.5, **given) for f in (gpu, ref))
            assert got.dtype == torch.float32
            assert ((got - want).abs() <= 1e-4 * want).all(), name

    def test_it_is_chosen_where_it_is_asked_for():
        q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 20, 16)
        before = dispatch.ran.copy()
        with dispatch.use("gpu"):
            ops.column_mass(q, k, 1.0)
            noise = Noise("gaussian", 0, torch.arange(20)[None, None], 19)
            ops.column_mass(q, k, 1.0, noise=noise)
        ran = [(backend, why) for _, backend, why in (dispatch.ran - before)]
        why = "noise 'gaussian' is not one of gumbel, constant"
        assert sorted(ran) == [("gpu", ""), ("ref", why)]

    def test_the_largest_noise_is_finite():
        """The hash of key 13,984,714 ends in ones: u is 1 - 2^-24, not 1."""
        noise = Noise("gumbel", 5, torch.tensor([[[13_984_714, *range(40)]]]), 0, True)
        assert noise.block(1, 1, 0, 1, 1).item() > 16
        q, k = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 41, 16)
        got, want = (f.column_mass(q, k, 1.0, noise=noise) for f in (gpu, ref))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-30)

else:

    @pytest.mark.slow
    def test_in_the_interpreter():
        interpreter.run(__file__)

    def test_what_is_not_covered_is_said():
        q, k = torch.zeros(1, 1, 1, 512, dtype=FP16), torch.zeros(1, 1, 9, 512)
        noise = Noise("gaussian", 0, torch.arange(9)[None, None], 0)
        said = gpu.COVERAGE.problems(q, k, 1.0, noise=noise)
        for what in ("512", "float16", "gaussian"):
            assert any(what in s for s in said)
