"""Functions of sixteen lanes against torch in float64."""

from __future__ import annotations

import pytest
import torch
from numba.extending import intrinsic

from kvloom.kernels.arguments import Arguments

LAYOUT = Arguments(x=int, out=int, numbers=int)


def compiled(name):
    """A kernel that replaces numbers by a function of them."""
    from kvloom.kernels import simd
    from kvloom.kernels.cpu_runtime import Kernel, read_arguments
    from kvloom.kernels.simd import load, store

    layout, function = LAYOUT.dtype, getattr(simd, name)

    def kernel(args):
        a = read_arguments(args, layout)
        for i in range(0, a.numbers, 16):
            store(a.out + 4 * i, function(load(a.x + 4 * i)))

    compiled = Kernel(kernel, f"{name} of a test")

    def run(x):
        out = torch.empty_like(x)
        compiled.run(LAYOUT.pack(x=x.data_ptr(), out=out.data_ptr(), numbers=x.numel()), 0, 1)
        return out

    return run


@pytest.fixture(scope="module")
def exponential():
    return compiled("exp")


@pytest.mark.parametrize("features", ["of this machine", "none"])
def test_powers_of_2_are_close_to_those_of_float64(monkeypatch, features):
    from kvloom.kernels import simd

    name = "power_of_2"
    if features == "none":
        monkeypatch.setattr(simd, "features", set)
        monkeypatch.setattr(simd, "plain_power", intrinsic(simd.power_of_2._defn), raising=False)
        name = "plain_power"
    power = compiled(name)
    x = torch.cat([torch.linspace(-125, 120, 1 << 16), torch.arange(-120.0, 120)])
    torch.testing.assert_close(power(x).double(), 2 ** x.double(), rtol=1e-5, atol=0)
    ends = torch.tensor([-torch.inf, -1e30, -160.0, torch.nan] * 4)
    want = torch.tensor([0.0, 0.0, 0.0, torch.nan] * 4)
    torch.testing.assert_close(power(ends), want, rtol=0, atol=0, equal_nan=True)


def test_exponentials_are_those_of_float64(exponential):
    x = torch.linspace(-87, 88, 1 << 16)
    torch.testing.assert_close(exponential(x).double(), x.double().exp(), rtol=2e-7, atol=0)


def test_halves_of_log_2_round_to_either_side(exponential):
    """There, a number and its successor have different exponents of 2."""
    x = torch.arange(-124, 126).double().add(0.5).mul(torch.tensor(2.0).double().log()).float()
    x = torch.cat([x.nextafter(torch.tensor(-torch.inf)), x, x.nextafter(torch.tensor(torch.inf))])
    x = x[: x.numel() // 16 * 16]
    torch.testing.assert_close(exponential(x).double(), x.double().exp(), rtol=2e-7, atol=0)


def test_it_ends_where_fp32_does(exponential):
    x = torch.tensor([-torch.inf, -1e30, -88.0, -87.01, 0.0, -0.0, 88.0, 88.5, 1e30, torch.inf])
    x = torch.cat([x, torch.tensor([torch.nan, -torch.nan]), torch.zeros(4)])
    top = float(torch.tensor(88.0).double().exp())
    want = torch.tensor([0.0] * 4 + [1.0, 1.0] + [top] * 4 + [torch.nan] * 2 + [1.0] * 4)
    torch.testing.assert_close(exponential(x), want, rtol=2e-7, atol=0, equal_nan=True)
