"""kernels.attend.cpu.gathered on the other formats: transforms, keys before RoPE, few bits.

The loops get the listed tokens, unpacked to fp32. Forms are few, as each is compiled, and
everything else is drawn.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kv_views import channel, chosen_agree, hidden, mapped, token
from sampling import slow_except

FORMS = {  # keys, values, head dimension
    "skvq": (
        mapped(2, 16, "fp8", pre_rope=True, span="layer", reorder=True, clip="group"),
        mapped(1.5, 16, "fp8", span="layer", reorder=True, clip="group"),
        32,
    ),
    "divided and rotated": (
        mapped(3, 16, smooth=True),
        mapped(4, 16, "bf16", rotation="group"),
        48,
    ),
    "rotated and divided": (
        mapped(1.5, 0, "fp32", rotation="group"),
        mapped(8, 16, reorder=True, smooth=True),
        80,
    ),
    "rotated heads": (channel(4, 16, rotation="head"), mapped(2, 0, rotation="head"), 80),
    "fixed, more groups than lanes": (
        mapped(4, 16, span="layer", reorder=True, static=True, smooth=True),
        mapped(2, 16, span="layer", reorder=True),
        144,
    ),
    "interleaved before RoPE": (channel(3, 32, pre_rope=True), token(1, 16), 80),
}


every_form = pytest.mark.parametrize("form", slow_except(list(FORMS), "skvq"))
rotated_is_slow = pytest.mark.parametrize(
    "form", ["skvq", pytest.param("divided and rotated", marks=pytest.mark.slow)]
)


def check(form, *args, **options):
    chosen_agree((*FORMS[form], torch.float32), *args, **options)


@every_form
@pytest.mark.parametrize(("m", "rest", "first"), [(1, 0, 0), (0, 5, 3), (40, 3, 16), (150, 70, 4)])
def test_any_choice_of_any_format(form, m, rest, first):
    for packed_end in ((200, 200), (100, 163), (0, 0)):  # chosen tokens packed, some of them, none
        check(form, (4, 2, 2), 200 + rest, m, 200, first, packed_end)


@rotated_is_slow
@pytest.mark.parametrize(  # the kernels for other numbers of rows take long to compile
    "heads", [(8, 2, 4), *(pytest.param(x, marks=pytest.mark.slow) for x in ((3, 1, 1), (2, 2, 2)))]
)
def test_heads_choose_together_or_alone(form, heads):
    check(form, heads, 300, 111, 260, 4, (280, 270))


@pytest.mark.parametrize(
    "form", ["skvq", pytest.param("interleaved before RoPE", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("h", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_keys_before_rope_are_turned_to_positions_with_gaps(form, h):
    check(form, (4, 2, h), 400, 90, 350, 4, (352, 352), gaps=True)
    check(form, (4, 2, h), 900, 300, 850, 0, (870, 870), gaps=True)


@pytest.mark.parametrize(
    "form", ["skvq", pytest.param("rotated and divided", marks=pytest.mark.slow)]
)
def test_masks_softcap_and_bias(form):
    total = 3 + 50 + 30
    bias = torch.randn(2, 4, total, generator=torch.Generator().manual_seed(1))
    for visible in (None, hidden(2, 1, total), hidden(2, 2, total)):
        check(form, (4, 2, 2), 240, 50, 210, 3, visible=visible, softcap=2.0, bias=bias[:1])
        check(form, (4, 2, 2), 240, 50, 210, 3, visible=visible, bias=bias)


@every_form
@given(
    st.integers(1, 400),
    st.floats(0, 1),
    st.floats(0, 1),
    st.tuples(st.integers(0, 400), st.integers(0, 400)),
    st.integers(0, 20),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_drawn_shapes(form, n, share, part, packed_end, first, b, seed):
    begin = int(n * share)
    check(form, (4, 2, 2), n, int(begin * part), begin, first, packed_end, b, seed)


@pytest.mark.parametrize("threads", [1, 3])
@rotated_is_slow
def test_stretches_on_several_threads_leave_no_seam(form, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(form, (4, 2, 2), 9000, 4000, 8000, 16, (8960, 8872), 1)
    finally:
        torch.set_num_threads(before)
