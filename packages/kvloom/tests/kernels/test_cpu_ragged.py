"""Attention of heads with different numbers of tokens: float64 loops, reference and kernel."""

import numpy as np
import pytest
import torch

import naive
from kv_views import FP32, TOL, channel, span_view, spans, token
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend.reference import attend_regions
from kvloom.kernels.attend.regions import KVView, Region
from kvloom.recipe import resolve
from kvloom.store import Packed
from sampling import slow_except

D, HEADS = 32, 2  # with these, the laws compile the kernel of exact tokens, too
FORMS = {  # keys, values, dtype of exact tokens; the number of a head's tokens is a multiple
    "exact": (None, None, FP32, 1),
    "bf16": (None, None, torch.bfloat16, 1),
    "balanced": (
        channel(4, 64, rotation="head"),
        Packed(2, "token", 0, rotation="group"),
        FP32,
        64,
    ),
    "2 bit, exact values": (channel(2, 32), None, torch.bfloat16, 32),
    "2 bit, 1.5 bit": (channel(2, 32), token(1.5, 16, "bf16"), FP32, 160),
    "exact keys, 3 bit": (None, token(3, 0, "fp8"), torch.float16, 8),
}


def behind_nothing(keys, values, where, visible=None):
    """The tokens of spans as a region behind one without tokens, in the same encodings."""
    none = torch.empty(len(where.bounds), HEADS, 0, D, dtype=keys.exact.dtype)
    views = (KVView(None, none, view.encoding) for view in (keys, values))
    hidden = None if visible is None else visible[..., :0]
    return [Region(*views, visible=hidden), Region(keys, values, where, visible)]


@pytest.mark.sample
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("counts", [[1, 3, 0, 2], [9, 0], [0, 0, 20, 1], [5, 5]])
@pytest.mark.parametrize("form", slow_except(list(FORMS), "exact", "2 bit, 1.5 bit"))
def test_every_head_reads_its_own_tokens(form, counts, queries, threads):
    keys_format, values_format, dtype, unit = FORMS[form]
    where = spans(unit * torch.tensor(counts).view(-1, HEADS))
    batch, hq = len(where.bounds), 3 * HEADS
    total = int(where.bounds[..., 1].sum())
    keys, k = span_view(keys_format, total, D, dtype, 0)
    values, v = span_view(values_format, total, D, dtype, 1)
    g = torch.Generator().manual_seed(2)
    q = torch.randn(batch, hq, queries, D, generator=g)
    visible = torch.rand(batch, HEADS, where.longest, generator=g) > 0.3
    for options in ({}, {"softcap": 2.0}, {"visible": visible}):
        regions = behind_nothing(keys, values, where, options.get("visible"))
        before, old = dispatch.ran["attend", "cpu", ""], torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with dispatch.use("auto"):
                found = ops.attend(q, regions, 0.125, softcap=options.get("softcap"))
        finally:
            torch.set_num_threads(old)
        assert dispatch.ran["attend", "cpu", ""] == before + 1
        want = attend_regions(q, regions, 0.125, softcap=options.get("softcap"))
        bound = 2e-2 if values.packed is not None and dtype != FP32 else 5e-6
        bound = 2e-2 if keys.packed is not None and dtype != FP32 else bound
        torch.testing.assert_close(want.out, found.out, atol=bound, rtol=bound)
        torch.testing.assert_close(want.lse, found.lse, atol=bound, rtol=bound)
        agrees_with_loops(found, q, k, v, where, **options)


def agrees_with_loops(found, q, k, v, where, visible=None, softcap=None):
    """Check a state against float64 loops over each head's own tokens, as the kernel reads them."""
    repeats = q.shape[1] // HEADS
    for row in range(q.shape[0]):
        for head in range(HEADS):
            first, count = where.bounds[row, head].tolist()
            heads = slice(head * repeats, (head + 1) * repeats)
            see = (
                None if visible is None else visible[row : row + 1, head : head + 1, :count].numpy()
            )
            if not count or (see is not None and not see.any()):
                assert (found.out[row, heads] == 0).all()
                assert (found.lse[row, heads] == -torch.inf).all()
                continue
            its = slice(first, first + count)
            out, lse = naive.attention(
                q[row : row + 1, heads].double().numpy(), k[:, :, its].double().numpy(),
                v[:, :, its].double().numpy(), 0.125, visible=see, softcap=softcap,
            )  # fmt: skip
            np.testing.assert_allclose(found.out[row, heads].numpy(), out[0], atol=TOL, rtol=TOL)
            np.testing.assert_allclose(found.lse[row, heads].numpy(), lse[0], atol=TOL, rtol=TOL)


@pytest.mark.parametrize(
    ("recipe", "why"), [("skvq", "before RoPE"), ("rptq", "grouped or scaled together")]
)
def test_what_the_kernel_does_not_read(recipe, why):
    store = resolve(recipe).store
    tail = torch.randn(1, 1, 0, D)
    keys, values = (KVView(None, tail, fmt and fmt.encoding) for fmt in (store.keys, store.values))
    q = torch.randn(1, 4, 1, D)
    with dispatch.use("auto"):
        assert why in ops.attend.choose(q, behind_nothing(keys, values, spans([[0, 0]]))).why
