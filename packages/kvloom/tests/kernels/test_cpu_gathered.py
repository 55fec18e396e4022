"""kernels.attend.cpu.gathered against float64 loops: every format, any choice, any mask.

The loops get the listed tokens, unpacked to fp32. Forms are few, as each is compiled, and
everything else is drawn.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
from kv_views import (
    FP32,
    TOL,
    attend_chosen,
    channel,
    chosen,
    chosen_agree,
    draw,
    mapped,
    problems,
    token,
)  # fmt: skip
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.regions import KVView, Slots
from kvloom.store import Encoding
from sampling import slow_except

FP16, BF16 = torch.float16, torch.bfloat16

FORMS = {  # keys, values, dtype of exact tokens
    "exact": (None, None, FP32),
    "2 and 4 bit": (channel(2, 32, "fp16"), token(4, 0, "fp32"), BF16),
    "3 and 1.5 bit": (token(3, 16, "bf16"), channel(1.5, 32, "fp8"), FP16),
}
D = 32
SLOTS = Slots(torch.zeros(1, 1, 1, dtype=torch.long), 1)
HEADS = [(4, 2, 2), (4, 2, 4), (2, 2, 2)]  # Hq, Hk, heads that choose
FOUR_ROWS = [pytest.param(x, marks=pytest.mark.slow) for x in ((3, 1, 1), (8, 2, 2))]


def agrees(form, *args, **options):
    return chosen_agree((*FORMS[form][:2], D, FORMS[form][2]), *args, **options)


@pytest.mark.parametrize("form", slow_except(list(FORMS), "exact", "3 and 1.5 bit"))
@pytest.mark.parametrize(("m", "rest", "first"), [(1, 0, 0), (0, 5, 3), (40, 3, 16), (150, 70, 4)])
def test_any_choice_of_any_format(form, m, rest, first):
    for packed_end in ((200, 200), (100, 163), (0, 0)):
        n = 200 + rest
        agrees(form, (4, 2, 2), n, m, 200, first, packed_end)


@pytest.mark.parametrize("heads", HEADS + FOUR_ROWS)
def test_heads_choose_together_or_alone(heads):
    agrees("exact", heads, 300, 111, 260, 4)


@pytest.mark.parametrize("heads", [(4, 2, 2), (4, 2, 4)])
@pytest.mark.parametrize("m", [1, 30, 200])
def test_masks_softcap_and_bias(heads, m):
    hq, _, h = heads
    n, total = 240, 3 + m + 30
    g = torch.Generator().manual_seed(m)
    bias = torch.randn(2, hq, total, generator=g)
    for width in (1, h):
        visible = torch.rand(2, width, total, generator=g) > 0.3
        visible[-1] = False
        agrees("exact", heads, n, m, 210, 3, visible=visible)
        agrees("exact", heads, n, m, 210, 3, visible=visible, softcap=2.0, bias=bias[:1])
    agrees("exact", heads, n, m, 210, 3, bias=bias)


@pytest.mark.parametrize("form", slow_except(list(FORMS), "exact", "3 and 1.5 bit"))
@given(
    st.integers(1, 400),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 20),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_drawn_shapes(form, n, share, part, first, b, seed):
    begin = int(n * share)
    agrees(form, (4, 2, 2), n, int(begin * part), begin, first, b=b, seed=seed)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_stretches_on_several_threads_leave_no_seam(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        agrees("exact", (4, 2, 2), 9000, 4000, 8000, 16, b=1)
        agrees("3 and 1.5 bit", (4, 2, 2), 9000, 4000, 8000, 16, (8872, 8960))
    finally:
        torch.set_num_threads(before)


def test_memory_layout_does_not_matter():
    q, k, v = (draw((2, 4, n, D), i) for i, n in enumerate((1, 200, 200)))
    slots = torch.rand(2, 150, 4).argsort(dim=1)[:, :50].transpose(1, 2)
    lead = draw((2, 4, 5, D), 3), draw((2, 4, 5, D), 4)
    want = attend_chosen(
        q, KVView(None, k), KVView(None, v), slots, 180, 0.1, first=lead, by=ref.attend_regions
    )
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, *lead)]
    apart = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v, *lead)]
    for a, b, c, *more in (turned, apart):
        got = attend_chosen(a, KVView(None, b), KVView(None, c), slots, 180, 0.1, first=tuple(more))
        torch.testing.assert_close(got, want, rtol=0, atol=TOL)


def test_the_reference_is_attention_over_the_listed_tokens():
    q, k, v = (draw((2, h, n, D), i) for i, (h, n) in enumerate(((4, 1), (2, 90), (2, 90))))
    for h, begin in itertools.product((2, 4), (90, 70)):
        slots = torch.rand(2, h, 70).argsort(dim=-1)[..., :20]
        sides = KVView(None, k), KVView(None, v)
        got = attend_chosen(q, *sides, slots, begin, 0.1, by=ref.attend_regions)
        for row, head in ((0, 0), (1, 3)):
            at = [*slots[row, head * h // 4].tolist(), *range(begin, 90)]
            one = [x[row : row + 1, head // 2 : head // 2 + 1, at] for x in (k, v)]
            out, _ = naive.attention(
                *(x.double().numpy() for x in (q[row : row + 1, head : head + 1], *one)), 0.1
            )
            np.testing.assert_allclose(got.out[row, head], out[0, 0], rtol=0, atol=TOL)


def test_nothing_chosen_is_the_identity():
    q, k = draw((1, 2, 1, D), 0), draw((1, 2, 10, D), 1)
    none = torch.empty(1, 2, 0, dtype=torch.long)
    got = attend_chosen(q, KVView(None, k), KVView(None, k), none, 10, 1.0)
    assert (got.out == 0).all()
    assert (got.lse == -torch.inf).all()


def test_what_is_not_covered_is_said():
    like = torch.zeros(1, 1, 4, D)
    said = problems(2, torch.zeros(1, 1, 4, 40, dtype=torch.float64), where=SLOTS)
    assert [s.split()[0] for s in said] == ["head_dim=40", "keys", "2"]
    for fmt, problem in (
        (token(2, 64), "group=64 is not a multiple of 16 that divides 32"),
        (mapped(8, 0, rotation="group"), "8 bit have more levels than registers hold"),
        (
            mapped(2, 16, pre_rope=True, smooth=True),
            "it does not read keys before RoPE that were divided or rotated",
        ),
    ):
        assert problems(1, like, fmt.encoding, where=SLOTS) == [f"keys: {problem}"]


def test_a_format_with_a_field_the_kernel_does_not_know_is_left_to_the_reference():
    @dataclass(frozen=True)
    class Rotated(Encoding):
        rotate: bool = False

    fmt = Rotated(2, "token", 32, rotate=True)
    like = torch.zeros(1, 1, 4, D)
    assert problems(1, like, fmt, where=SLOTS) == ["keys: rotate=True is not supported"]


def test_who_ran_is_counted():
    q, k = draw((1, 2, 1, D), 0), draw((1, 2, 10, D), 1)
    slots = torch.tensor([[[0, 3], [5, 2]]])
    regions = chosen(KVView(None, k), KVView(None, k), slots, 8)
    dispatch.ran.clear()
    with dispatch.use("auto"):
        ops.attend(q, regions, 0.2)
        ops.attend(q.requires_grad_(), regions, 0.2)
    with dispatch.use("ref"):
        ops.attend(q, regions, 0.2)
    backends = [(backend, why) for operation, backend, why in dispatch.ran]
    assert backends == [
        ("cpu", ""),
        ("ref", "q requires a gradient; call under torch.no_grad()"),
        ("ref", "the setting selects the reference"),
    ]
