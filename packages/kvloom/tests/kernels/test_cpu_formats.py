"""kernels.attend.cpu on formats beside the plain ones: few bits, transforms, keys before RoPE."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_views import agrees, channel, draw, hidden, known, mapped, rope, token
from kvloom.cache.layer import LayerCache
from kvloom.kernels import dispatch
from kvloom.recipe import Protect, Recipe
from kvloom.store import LayerFacts, Store
from sampling import slow_except

SKVQ = (
    mapped(2, 16, "fp8", pre_rope=True, span="layer", reorder=True, clip="group"),
    mapped(1.5, 16, "fp8", span="layer", reorder=True, clip="group"),
    32,
)
FORMS = {  # keys, values, head dimension
    "1 and 1.5 bit": (token(1, 16), channel(1.5, 32), 32),
    "1.5 and 1 bit": (channel(1.5, 16), token(1, 0, "fp8"), 32),
    "skvq": SKVQ,
    "more groups than lanes": (
        mapped(4, 16, span="layer", reorder=True),
        mapped(1.5, 16, span="layer"),
        144,
    ),
    "divided": (mapped(3, 16, smooth=True), mapped(8, 16, reorder=True, smooth=True), 48),
    "fixed": (
        mapped(2, 16, span="layer", reorder=True, static=True, smooth=True),
        mapped(1.5, 16, "fp8", static=True),
        32,
    ),
    "turbo": (mapped(3, 0, rotation="group"), mapped(1.5, 16, "fp8", rotation="group"), 48),
    "rotated heads": (channel(2, 32, rotation="head"), mapped(3, 16, rotation="head"), 48),
    "more groups than a table holds, before RoPE": (
        mapped(2, 16, "fp8", pre_rope=True, span="layer", reorder=True),
        mapped(2, 16, span="layer"),
        80,
    ),
    "interleaved before RoPE": (channel(2, 32, pre_rope=True), mapped(4, 0, rotation="group"), 80),
}


every_form = pytest.mark.parametrize(
    "form", slow_except(list(FORMS), "skvq", "turbo", "rotated heads")
)


def check(form, hq, hk, t, n, packed_end, b=2, seed=0, **options):
    keys, values, d = FORMS[form]
    agrees((keys, values, d, torch.float32), hq, hk, t, n, packed_end, b, seed, **options)


@pytest.mark.sample
@every_form
@pytest.mark.parametrize("n", [0, 1, 64, 127, 129, 500])
def test_any_number_of_tokens(form, n):
    for packed_end in {(0, 0), (n, n), (n, max(0, n - 37)), (max(0, n - 90), n)}:
        check(form, 4, 2, 1, n, packed_end)


@pytest.mark.parametrize(  # by default, a kernel for two rows, which other tests compile too
    ("hq", "hk", "t"),
    [
        (2, 2, 2),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((4, 4, 1), (5, 1, 1), (2, 1, 3))),
    ],
)
def test_any_grouping_of_heads_and_several_queries(hq, hk, t):
    for n in (t, 64, 333):
        check("skvq", hq, hk, t, n, (n - t, n - t), causal=True)


@pytest.mark.parametrize("form", ["skvq", "turbo"])
@pytest.mark.parametrize("n", [1, 300])
def test_masks_softcap_and_bias(form, n):
    hq, hk, packed_end = 4, 2, (n, n // 2)
    bias = torch.randn(2, hq, n, generator=torch.Generator().manual_seed(1))
    for visible in (None, hidden(2, 1, n), hidden(2, hk, n)):
        check(form, hq, hk, 1, n, packed_end, visible=visible, softcap=2.0, bias=bias[:1])
        check(form, hq, hk, 1, n, packed_end, visible=visible, causal=True, bias=bias)


@every_form
@given(
    st.integers(0, 900),
    st.tuples(st.integers(0, 900), st.integers(0, 900)),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_drawn_shapes(form, n, packed_end, b, seed):
    check(form, 4, 2, 1, n, packed_end, b, seed, causal=n >= 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_stretches_on_several_threads_leave_no_seam(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check("skvq", 4, 2, 1, 9000, (8990, 8871), 1)
    finally:
        torch.set_num_threads(before)


def test_a_layer_with_padding_sinks_and_keys_before_rope_attends_as_by_the_reference():
    keys, values, d = SKVQ
    recipe = Recipe(store=Store(keys, values), protect=Protect(3, (7, 7)))
    visible = torch.ones(2, 207, dtype=torch.bool)
    visible[1, :150] = False  # the second row begins far after the first tile
    found = {}
    dispatch.ran.clear()
    for backend in dispatch.CHOICES:
        layer = LayerCache(
            recipe, facts=LayerFacts(known(keys, 2, d), known(values, 2, d), rope(keys, d))
        )
        with dispatch.use(backend):
            q = draw((2, 4, 207, d), 0).contiguous()
            k, v = (draw((2, 2, 207, d), i).contiguous() for i in (1, 2))
            outs = []
            for lo, hi in ((0, 205), (205, 206), (206, 207)):
                part = slice(lo, hi)
                outs.append(
                    layer.attend(
                        q[:, :, part],
                        k[:, :, part],
                        v[:, :, part],
                        scale=0.2,
                        visible=visible[:, :hi],
                    )
                )
        found[backend] = torch.cat(outs[1:], dim=2)
    torch.testing.assert_close(found["auto"], found["ref"], rtol=0, atol=2e-6)
    assert dispatch.ran["attend", "cpu", ""] == 2  # sinks, and what is behind them, at once
