"""kernels.attend.reference against float64 loops, and the laws of merging."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from kv_views import hidden
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.regions import KVView, Region, Spans

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
heads = pytest.mark.parametrize(("hq", "hk"), HEADS.values(), ids=HEADS)


def drawn(hq, hk, t, n, d=16, batch=2, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, hq, t, d), (batch, hk, n, d), (batch, hk, n, d))
    return tuple(torch.randn(s, generator=g).to(dtype) for s in shapes)


def agrees(state, q, k, v, scale, tol=2e-6, **options):
    """state equals the naive attention; rows that see nothing are out 0 and lse -inf."""
    options = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, lse = naive.attention(*(x.double().numpy() for x in (q, k, v)), scale, **options)
    assert state.out.dtype == state.lse.dtype == torch.float32
    np.testing.assert_allclose(state.out.double().numpy(), out, rtol=0, atol=tol)
    np.testing.assert_allclose(state.lse.double().numpy(), lse, rtol=tol, atol=tol)


@heads
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65])
def test_attend_is_softmax_attention(subtests, hq, hk, n):
    for t, causal, softcap in itertools.product((1, 3, 17), (False, True), (None, 2.0)):
        with subtests.test(t=t, causal=causal, softcap=softcap):
            q, k, v = drawn(hq, hk, t, n)
            for visible in (None, hidden(2, 1, n), hidden(2, hk, n)):
                given = {"causal": causal, "visible": visible, "softcap": softcap}
                agrees(ref.attend_exact(q, k, v, 0.25, **given), q, k, v, 0.25, **given)


@heads
@pytest.mark.parametrize("rows", [1, 2], ids=["one bias", "a bias for each row"])
def test_a_bias_is_added_to_the_logits(subtests, hq, hk, rows):
    for t, n in ((1, 1), (1, 65), (3, 64), (17, 17)):
        with subtests.test(t=t, n=n):
            q, k, v = drawn(hq, hk, t, n)
            bias = 3 * torch.randn(rows, hq, n, generator=torch.Generator().manual_seed(1))
            some, by_head = hidden(2, 1, n), hidden(2, hk, n)
            for visible, softcap in ((None, None), (some, 2.0), (by_head, None)):
                given = {"causal": t > 1, "visible": visible, "softcap": softcap, "bias": bias}
                agrees(ref.attend_exact(q, k, v, 0.25, **given), q, k, v, 0.25, **given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_attended_to_in_fp32(dtype):
    q, k, v = drawn(4, 2, 3, 65, dtype=dtype)
    agrees(ref.attend_exact(q, k, v, 0.25, causal=True), q, k, v, 0.25, causal=True)


@heads
@pytest.mark.parametrize("causal", [False, True])
def test_huge_logits_neither_overflow_nor_lose_the_winner(hq, hk, causal):
    # whole numbers, so that fp32 logits up to 1e4 are exact and the tolerance can stay
    q, k, v = drawn(hq, hk, 3, 65)
    q, k = (q * 100).round(), (k * 40).round().clamp(-60, 60)
    logits = (q[:, :hk] @ k.mT * 0.5).abs()
    assert logits.max() > 1e4
    got = ref.attend_exact(q, k, v, 0.5, causal=causal)
    agrees(got, q, k, v, 0.5, causal=causal)
    assert torch.isfinite(got.out).all()


def test_rows_that_see_nothing_give_zero_and_minus_infinity():
    q, k, v = drawn(4, 2, 5, 3)
    got = ref.attend_exact(
        q, k, v, 1.0, causal=True
    )  # queries 0 and 1 stand before the first token
    assert not got.out[:, :, :2].any()
    assert (got.lse[:, :, :2] == -torch.inf).all()
    assert torch.isfinite(got.lse[:, :, 2:]).all()
    none = ref.attend_exact(q, k, v, 1.0, visible=torch.zeros(2, 1, 3, dtype=torch.bool))
    assert not none.out.any()
    assert (none.lse == -torch.inf).all()


def test_hidden_tokens_may_hold_anything_finite():
    q, k, v = drawn(4, 2, 3, 20)
    visible = hidden(2, 1, 20)
    want = ref.attend_exact(q, k, v, 0.25, visible=visible)
    at = (~visible)[..., None]
    got = ref.attend_exact(
        q, k.masked_fill(at, 3e38), v.masked_fill(at, -3e38), 0.25, visible=visible
    )
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)


def test_memory_layout_does_not_matter():
    q, k, v = drawn(4, 2, 6, 40, d=32)
    flip = [x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::2, ::2] for x in (q, k, v)]
    got, want = (
        ref.attend_exact(*flip, 0.25),
        ref.attend_exact(*(x.contiguous() for x in flip), 0.25),
    )
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_query_rows_leave_no_seam(monkeypatch, causal):
    q, k, v = drawn(4, 2, 17, 33)
    whole = ref.attend_exact(q, k, v, 0.25, causal=causal, softcap=5.0)
    monkeypatch.setattr(ref, "_BLOCK_NUMEL", 2 * 4 * 33 * 5)  # five rows at a time
    blocks = ref.attend_exact(q, k, v, 0.25, causal=causal, softcap=5.0)
    torch.testing.assert_close(blocks, whole, rtol=0, atol=1e-6)


# --- sdpa --------------------------------------------------------------------------------------


@heads
@pytest.mark.parametrize("masked", [None, "a row", "a head"])
@pytest.mark.parametrize("layout", ["contiguous", "heads inside"])
def test_sdpa_is_attend(subtests, hq, hk, masked, layout):
    for t, n in ((1, 1), (1, 64), (3, 3), (3, 65), (17, 17), (17, 40)):
        with subtests.test(t=t, n=n):
            q, k, v = drawn(hq, hk, t, n)
            if layout == "heads inside":  # as models give it: [B, T, H, D] seen as [B, H, T, D]
                q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
            visible = None if masked is None else hidden(2, 1 if masked == "a row" else hk, n)
            got = ref.sdpa(q, k, v, 0.25, causal=t > 1, visible=visible)
            want = ref.attend_exact(q, k, v, 0.25, causal=t > 1, visible=visible)
            assert got.shape == q.shape
            sees = want.lse > -torch.inf  # a row that sees nothing is padding: anything but NaN
            torch.testing.assert_close(got[sees], want.out[sees], rtol=0, atol=2e-6)
            assert not got.isnan().any()


@pytest.mark.parametrize("masked", [False, True])
def test_sdpa_holds_no_mask_of_all_queries(masked, monkeypatch):
    q, k, v = drawn(4, 2, 50, 70)
    visible = hidden(2, 2, 70) if masked else None
    whole = ref.sdpa(q, k, v, 0.25, causal=True, visible=visible)
    masks = []
    fused = torch.nn.functional.scaled_dot_product_attention

    def recorded(q, k, v, mask, **options):
        masks.append(mask.numel())
        return fused(q, k, v, mask, **options)

    monkeypatch.setattr(ref, "_MASK_NUMEL", 2000)
    monkeypatch.setattr(ref.F, "scaled_dot_product_attention", recorded)
    rows = ref.sdpa(q, k, v, 0.25, causal=True, visible=visible)
    torch.testing.assert_close(rows, whole, rtol=0, atol=1e-6)
    assert len(masks) > 1
    assert max(masks) <= 2000


@heads
@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("rows", [1, 2], ids=["one bias", "a bias for each row"])
def test_sdpa_of_one_query_takes_a_bias(subtests, hq, hk, n, rows):
    q, k, v = drawn(hq, hk, 1, n)
    bias = 3 * torch.randn(rows, hq, n, generator=torch.Generator().manual_seed(1))
    masks = {"no mask": None, "a row": hidden(2, 1, n), "a head": hidden(2, hk, n)}
    for name, visible in masks.items():
        with subtests.test(name):
            given = {"visible": visible, "bias": bias}
            got = ref.sdpa(q, k, v, 0.25, causal=False, **given)
            want = ref.attend_exact(q, k, v, 0.25, **given)
            sees = want.lse > -torch.inf
            torch.testing.assert_close(got[sees], want.out[sees], rtol=0, atol=2e-6)
            assert not got.isnan().any()
            half = ref.sdpa(q.half(), k.half(), v.half(), 0.25, causal=False, **given)
            torch.testing.assert_close(half[sees].float(), want.out[sees], rtol=0, atol=1e-2)


# --- merge -------------------------------------------------------------------------------------


@st.composite
def parts(draw):
    """q, k, v and a split of the tokens into 1 to 5 parts, some empty, some with large logits."""
    cuts = sorted(draw(st.lists(st.integers(0, 40), min_size=0, max_size=4)))
    q, k, v = drawn(4, 2, 3, 40, seed=draw(st.integers(0, 999)))
    visible = hidden(2, 1, 40, seed=draw(st.integers(0, 99))) if draw(st.booleans()) else None
    scale = draw(st.sampled_from([0.25, 20.0]))
    edges = [0, *cuts, 40]
    states = [
        ref.attend_exact(
            q,
            k[:, :, a:b],
            v[:, :, a:b],
            scale,
            visible=None if visible is None else visible[:, :, a:b],
        )
        for a, b in itertools.pairwise(edges)
    ]
    return states, ref.attend_exact(q, k, v, scale, visible=visible)


def close(a: ref.AttentionState, b: ref.State) -> None:
    """Equal up to fp32: an lse of size s is off by eps * s, and so is a weight exp(lse)."""
    size = b.lse[b.lse > -torch.inf].abs().max().item()
    tol = 4e-6 + 4 * torch.finfo(torch.float32).eps * size
    torch.testing.assert_close(a.out, b.out, rtol=0, atol=tol)
    torch.testing.assert_close(a.lse, b.lse, rtol=0, atol=tol)


@settings(max_examples=40)
@given(parts())
def test_merge_of_the_parts_is_attention_over_the_union(drawn_parts):
    states, union = drawn_parts
    close(ref.merge(states), union)


@settings(max_examples=40)
@given(parts(), st.randoms(use_true_random=False))
def test_merge_is_free_of_order(drawn_parts, random):
    states, _ = drawn_parts
    shuffled = random.sample(states, len(states))
    close(ref.merge(shuffled), ref.merge(states))


@settings(max_examples=40)
@given(parts(), st.integers(0, 5))
def test_merge_is_associative(drawn_parts, cut):
    states, _ = drawn_parts
    groups = [g for g in (states[:cut], states[cut:]) if g]
    close(ref.merge([ref.merge(g) for g in groups]), ref.merge(states))


@settings(max_examples=40)
@given(parts())
def test_the_empty_part_is_the_identity(drawn_parts):
    _, whole = drawn_parts
    empty = ref.AttentionState(torch.zeros_like(whole.out), torch.full_like(whole.lse, -torch.inf))
    for order in ([whole, empty], [empty, whole], [empty, whole, empty]):
        merged = ref.merge(order)
        assert torch.equal(merged.out, whole.out)
        assert torch.equal(merged.lse, whole.lse)


def test_merge_of_nothing_seen_is_nothing_seen():
    q, k, v = drawn(4, 2, 3, 0)
    empty = ref.attend_exact(q, k, v, 1.0)
    merged = ref.merge([empty, empty])
    assert not merged.out.any()
    assert (merged.lse == -torch.inf).all()


def test_merge_weighs_parts_that_differ_by_more_than_exp_can_hold():
    out = torch.ones(1, 1, 1, 4)
    states = [
        ref.AttentionState(out * i, torch.full((1, 1, 1), lse)) for i, lse in ((1, -1e4), (2, 1e4))
    ]
    merged = ref.merge(states)
    assert torch.equal(merged.out, out * 2)
    assert merged.lse.item() == 1e4


def test_merge_by_hand():
    # part 1: one token, logit 0, value 1; part 2: two tokens, logits ln 2 and ln 5, values 0 and 3:
    # lse 0 and ln 7, outs 1 and 15/7. Union: weights 1, 2, 5 of 8 -> (1 + 0 + 15) / 8 = 2.
    one = ref.AttentionState(torch.tensor([[[[1.0]]]]), torch.tensor([[[0.0]]]))
    two = ref.AttentionState(torch.tensor([[[[15 / 7]]]]), torch.tensor([[[7.0]]]).log())
    merged = ref.merge([one, two])
    assert merged.out.item() == pytest.approx(2.0)
    assert merged.lse.item() == pytest.approx(np.log(8.0))


@pytest.mark.parametrize("where", [None, Spans(torch.tensor([[[0, 6], [6, 0]]]), 6)])
def test_no_tokens_have_the_channels_of_values(where):
    """Some models have narrower values than keys."""
    q, k, v = (
        torch.randn(1, 4, 1, 32),
        torch.randn(1, 1 + (where is None), 6, 32),
        torch.randn(1, 1 + (where is None), 6, 16),
    )
    regions = [Region.exact(k[:, :, :0], v[:, :, :0]), Region.exact(k, v)]
    if where is not None:
        regions = [Region(KVView(None, k), KVView(None, v), where)]
    assert ref.attend_regions(q, regions, 0.2).out.shape == (1, 4, 1, 16)
