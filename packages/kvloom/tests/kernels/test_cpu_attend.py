"""kernels.attend.cpu against float64 loops and the reference: every format, any shape, any mask.

The loops get what the kernel gets, unpacked to fp32. Kernels are compiled for a form (formats,
head dimension, dtype, how many query rows at once), so forms are few and everything else is drawn.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_views import agrees, attend, channel, draw, hidden, kv_view, mapped, problems, token
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.regions import KVView
from kvloom.store import Encoding
from kvloom.store.packed import PackedTokens
from sampling import slow_except

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


SMALL = (channel(2, 32), token(2, 32), 32, FP32)  # the laws compile it too
KIVI = (*SMALL[:2], 128, FP32)
FORMS = {  # keys, values, head dimension, dtype of the exact tokens
    "small": SMALL,
    "kivi": KIVI,
    "4 bit": (channel(4, 64, "bf16"), token(4, 64, "bf16"), 64, BF16),
    "3 bit": (channel(3, 16, "fp32"), token(3, 16, "fp32"), 80, FP16),
    "8 bit": (channel(8, 128), token(8, 32), 96, FP32),
    "fp8": (channel(2, 32, "fp8"), token(4, 16, "fp8"), 80, FP32),
    "axes swapped": (token(2, 32), channel(2, 32), 64, FP32),
    "mixed": (token(3, 32, "bf16"), channel(8, 16), 96, BF16),
    "a head a group": (token(4, 0), token(2, 0), 96, FP32),
    "keys only": (token(8, 64, "fp32"), None, 256, FP16),
    "values only": (None, token(4, 16), 80, FP32),
    "exact": (None, None, 16, FP32),
    "exact fp16": (None, None, 80, FP16),
    "exact bf16": (None, None, 128, BF16),
}
every_form = pytest.mark.parametrize("form", slow_except(list(FORMS), "small", "mixed"))
HEADS = [(4, 4, 1), (4, 2, 1), (4, 1, 1), (6, 2, 2), (4, 1, 2), (2, 2, 3), (5, 1, 1)]  # Hq, Hk, T
COMMON = (4, 2, 1), (4, 1, 2), (2, 2, 3)  # a kernel is compiled for one, two and more rows a head


@pytest.mark.sample
@every_form
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 127, 128, 129, 500])
def test_any_number_of_tokens(form, n):
    for packed_end in {(0, 0), (n, n), (n, max(0, n - 37)), (max(0, n - 90), n)}:
        agrees(FORMS[form], 4, 2, 1, n, packed_end)


@pytest.mark.parametrize("heads", slow_except({str(x): x for x in HEADS}, *map(str, COMMON)))
@pytest.mark.parametrize("form", slow_except(("small", "kivi", "exact bf16"), "small"))
def test_any_grouping_of_heads_and_up_to_8_queries(form, heads):
    hq, hk, t = heads
    for n, causal in itertools.product((t, 64, 333), (False, True)):
        agrees(FORMS[form], hq, hk, t, n, (n - t, n - t), causal=causal)


@pytest.mark.parametrize("form", slow_except(("small", "kivi", "mixed"), "small"))
@pytest.mark.parametrize("n", [1, 40, 300])
@pytest.mark.parametrize("t", [1, 2])
def test_masks_softcap_and_bias(form, n, t):
    form, hq, hk, packed_end = FORMS[form], 4, 2, (n, n // 2)
    bias = torch.randn(2, hq, n, generator=torch.Generator().manual_seed(1))
    for visible in (None, hidden(2, 1, n), hidden(2, hk, n), hidden(2, 1, n).expand(2, hk, n)):
        agrees(form, hq, hk, t, n, packed_end, visible=visible)
        agrees(form, hq, hk, t, n, packed_end, visible=visible, softcap=2.0, bias=bias[:1])
        agrees(form, hq, hk, t, n, packed_end, visible=visible, causal=n >= t, bias=bias)


@every_form
@given(
    st.sampled_from(COMMON),
    st.integers(0, 700),
    st.tuples(st.integers(0, 700), st.integers(0, 700)),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_drawn_shapes(form, heads, n, packed_end, b, seed):
    hq, hk, t = heads
    if form not in ("small", "kivi"):  # one form more for each number of rows is too many
        hq, hk, t = 4, 2, 1
    agrees(FORMS[form], hq, hk, t, n, packed_end, b, seed, causal=n >= t)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_stretches_on_several_threads_leave_no_seam(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for b, hq, hk in ((1, 1, 1), (1, 4, 1), (2, 4, 2)):
            agrees(SMALL, hq, hk, 1, 20_000, (19_968, 19_848), b)
        agrees(SMALL, 1, 1, 1, 20_000, (19_968, 19_848), 1, visible=hidden(1, 1, 20_000))
    finally:
        torch.set_num_threads(before)


def test_memory_layout_does_not_matter():
    q, k, v = (draw((2, 4, n, 32), i) for i, n in enumerate((1, 200, 200)))
    want = ref.attend_exact(q, k, v, 0.1)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    apart = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)]
    for a, b, c in (turned, apart):
        got = attend(a, KVView(None, b), KVView(None, c), 0.1)
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


def test_codes_that_do_not_lie_in_order_are_read_in_order():
    keys, k = kv_view(SMALL[0], 128, 200, 2, 2, 32, FP32, 1)
    values, v = kv_view(SMALL[1], 130, 200, 2, 2, 32, FP32, 2)
    q = draw((2, 4, 1, 32), 0)

    def flipped(x):
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    def odd(held):
        view = held.packed
        parts = {name: flipped(getattr(view, name)) for name in ("codes", "scale", "zero")}
        return held._replace(packed=view._replace(**parts))

    got = attend(q, odd(keys), odd(values), 0.1)
    torch.testing.assert_close(got, ref.attend_exact(q, k, v, 0.1), rtol=0, atol=2e-6)


@every_form
@pytest.mark.parametrize("t", [1, 3])
def test_a_query_that_is_not_finite_has_no_result(form, t):
    kfmt, vfmt, d, dtype = FORMS[form]
    keys, _ = kv_view(kfmt, 256, 300, 2, 2, d, dtype, 1)
    values, _ = kv_view(vfmt, 200, 300, 2, 2, d, dtype, 2)
    q = draw((2, 4, t, d), 0)
    want = attend(q, keys, values, 0.1)
    bad = torch.zeros(2, 4, t, dtype=torch.bool)
    for at, number in (((0, 1, 0), torch.nan), ((1, 2, -1), torch.inf), ((1, 3, 0), -torch.inf)):
        q[at][d // 2], bad[at] = number, True
    got = attend(q, keys, values, 0.1)
    assert got.out[bad].isnan().all()
    assert got.lse[bad].isnan().all()
    assert torch.equal(got.out[~bad], want.out[~bad])
    assert torch.equal(got.lse[~bad], want.lse[~bad])


def test_huge_logits_neither_overflow_nor_lose_the_winner():
    q, k, v = (draw((2, 4, n, 32), i) for i, n in enumerate((1, 300, 300)))
    q, k = (q * 100).round(), (k * 40).round().clamp(-60, 60)
    got = attend(q, KVView(None, k), KVView(None, v), 0.5)
    want = ref.attend_exact(q, k, v, 0.5)
    assert want.lse.abs().max() > 1e4
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=2e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=0)


def test_hidden_tokens_may_hold_anything_finite():
    q, k, v = (draw((2, 4, n, 32), i).contiguous() for i, n in enumerate((1, 300, 300)))
    visible = hidden(2, 1, 300)
    want = attend(q, KVView(None, k), KVView(None, v), 0.1, visible=visible)
    at = ~visible[..., None]
    sides = (KVView(None, x.masked_fill(at, y)) for x, y in ((k, 3e38), (v, -3e38)))
    got = attend(q, *sides, 0.1, visible=visible)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


@pytest.mark.slow  # a kernel for each
@pytest.mark.parametrize("meta", ["fp16", "bf16", "fp32", "fp8"])
def test_a_constant_group_and_subnormal_scales_come_back(meta):
    x = torch.zeros(1, 1, 64, 32)
    x[:, :, :32] = 7.0
    x[:, :, 32:, ::2] = 1e-6  # a scale that fp16 holds as a subnormal number
    view = PackedTokens(channel(2, 32, meta))
    view.append(x)
    keys = KVView(view.view(), x[:, :, :0], view.fmt.encoding)
    q = draw((1, 1, 1, 32), 3)
    v = draw((1, 1, 64, 32), 4)
    got = attend(q, keys, KVView(None, v), 1.0)
    want = ref.attend_exact(q, keys.tensor(), v, 1.0)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_what_is_not_covered_is_said():
    like = torch.zeros(1, 1, 4, 128)
    assert problems(1, like, *(fmt.encoding for fmt in KIVI[:2])) == []
    said = problems(1, torch.zeros(1, 1, 4, 40, dtype=torch.float64), None, token(2, 32).encoding)
    assert len(said) == 3
    assert "head_dim=40" in said[0]
    assert "float64" in said[1]
    assert said[2] == "values: group=32 is not a multiple of 16 that divides 40"


@pytest.mark.parametrize(
    ("fmt", "problem"),
    [
        (mapped(8, 32, rotation="group"), "8 bit have more levels than registers hold"),
        (mapped(2, 16, span="layer"), "136 groups a token are more than 128"),
        (
            mapped(2, 32, pre_rope=True, rotation="group"),
            "it does not read keys before RoPE that were divided or rotated",
        ),
        (
            mapped(2, 32, pre_rope=True, smooth=True),
            "it does not read keys before RoPE that were divided or rotated",
        ),
    ],
)
def test_a_format_it_does_not_know_is_left_to_the_reference(fmt, problem):
    assert problems(1, torch.zeros(1, 17, 4, 128), fmt.encoding) == [f"keys: {problem}"]


def test_a_format_with_a_field_the_kernel_does_not_know_is_left_to_the_reference():
    @dataclass(frozen=True)
    class Turned(Encoding):
        by: int = 0

    like = torch.zeros(1, 1, 4, 128)
    assert problems(1, like, Turned(2, "token", 32)) == []
    assert problems(1, like, Turned(2, "token", 32, by=1)) == ["keys: by=1 is not supported"]
