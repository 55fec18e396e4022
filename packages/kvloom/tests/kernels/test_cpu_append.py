"""Exact tokens appended by the compiled kernel: the reference's copy, and its refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.kernels import dispatch, ops
from kvloom.kernels.append import cpu
from kvloom.kernels.append import reference as ref
from kvloom.kernels.append.reference import WriteTarget

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
MOST = (torch.inf, 10.0)


def drawn(b, h, t, d, dtype, seed=0):
    """Keys as a model gives them, and values that lie token by token."""
    torch.manual_seed(seed)
    return torch.randn(b, h, t, d).to(dtype), torch.randn(b, t, h, d).to(dtype).transpose(1, 2)


def rooms(k, rows, at):
    """Storage that holds sevens, for keys and for values."""
    b, h, _, d = k.shape
    return tuple(WriteTarget(torch.full((b, h, rows, d), 7.0, dtype=k.dtype), i) for i in at)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.sampled_from([16, 80, 128]),
    st.sampled_from(DTYPES), st.integers(0, 5), st.integers(0, 5),
)  # fmt: skip
def test_tokens_are_written_where_they_belong_and_nowhere_else(b, h, t, d, dtype, first, second):
    new = drawn(b, h, t, d, dtype)
    got, want = (rooms(new[0], 13, (first, second)) for _ in range(2))
    assert cpu.append(new, got, MOST)
    assert ref.append(new, want, MOST)
    for mine, its in zip(got, want, strict=True):
        assert torch.equal(mine.data, its.data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("t", [1, 3])
def test_every_head_may_have_a_place_of_its_own(t, dtype):
    new = drawn(2, 3, t, 48, dtype)
    at = torch.tensor([[4, 0, 6], [1, 2, 5]]).unsqueeze(-1)
    for append in (cpu.append, ref.append):
        got = rooms(new[0], 9, (at, 2))
        assert append(new, got, MOST)
        for b in range(2):
            for h in range(3):
                want = torch.full((9, 48), 7.0, dtype=dtype)
                want[at[b, h] : at[b, h] + t] = new[0][b, h]
                assert torch.equal(got[0].data[b, h], want)
        assert torch.equal(got[1].data[:, :, 2 : 2 + t], new[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("append", [cpu.append, ref.append], ids=["cpu", "ref"])
def test_numbers_that_may_not_be_held_are_found_wherever_they_are(append, side, dtype):
    for bad in (torch.nan, -torch.nan, torch.inf, -torch.inf, 10.25, -10.25):
        for where in ((0, 0, 0, 0), (1, 2, 3, 47), (0, 1, 2, 16)):
            new = drawn(2, 3, 4, 48, dtype)
            new[side][where] = bad
            fits = side == 0 and abs(bad) == 10.25
            assert append(new, rooms(new[0], 9, (2, 5)), MOST) == fits
            assert append(new, rooms(new[0], 9, (2, 5)), None), "nobody looks"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most", [10.0, 448.0, 1.5 * 448, 65504.0, 32752.0, 131008.0, 0.1, 1e17])
def test_the_largest_number_that_may_be_held_may_be(dtype, most):
    top = torch.finfo(dtype).max
    x = torch.tensor(min(most, top), dtype=torch.float64).to(dtype)
    for number in (x, x.nextafter(torch.zeros_like(x)), x.nextafter(torch.full_like(x, torch.inf))):
        new = (number.expand(1, 1, 1, 16), torch.zeros(1, 1, 1, 16, dtype=dtype))
        held = number.double() <= min(most, top)
        for side in (new, new[::-1]):
            assert cpu.append(side, rooms(new[0], 1, (0, 0)), (most, most)) == held
            assert ref.within(side, (most, most)) == held


def test_which_backend_appends_is_counted_and_refusals_say_why(monkeypatch):
    monkeypatch.setattr(dispatch, "environment", lambda: "auto")
    dispatch.ran.clear()
    for t, d, dtype in ((1, 32, torch.float32), (9, 8, torch.float64)):
        new = drawn(1, 2, t, d, dtype)
        got = rooms(new[0], 20, (3, 4))
        assert ops.append(new, got, MOST)
        assert torch.equal(got[1].data[:, :, 4 : 4 + t], new[1])
    with dispatch.use("ref"):
        assert ops.append(new, got)
    assert list(dispatch.ran) == [
        ("append", "cpu", ""),
        (
            "append",
            "ref",
            "tokens are torch.float64, not fp32, fp16 or bf16; head_dim=8 is not a multiple of 16; "
            "more than 8 tokens a step",
        ),
        ("append", "ref", "the setting selects the reference"),
    ]


def test_rows_whose_numbers_lie_apart_are_written_too():
    x = torch.randn(1, 2, 32, 3).transpose(2, 3)
    got = rooms(x, 4, (0, 1))
    assert cpu.append((x, x), got, MOST)
    assert torch.equal(got[0].data[:, :, :3], x)
    assert torch.equal(got[1].data[:, :, 1:], x)
