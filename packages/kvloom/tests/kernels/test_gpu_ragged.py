"""Attention of heads with different numbers of tokens by the Triton kernel, against the reference.

In Triton's interpreter: see `test_gpu_attend`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import families
import interpreter
import probe
import steps
from kv_views import FP32, channel, draw, mapped, span_view, spans, token
from kvloom.cache.layer import LayerCache
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend.reference import attend_regions
from kvloom.kernels.attend.regions import KVView, Region
from kvloom.kernels.attend.triton import attend as gpu
from kvloom.kernels.attend.triton import decode
from kvloom.recipe import resolve
from kvloom.store import KVSide, Packed

FP16 = torch.float16
needs_interpreter = pytest.mark.skipif(not interpreter.INTERPRETED, reason="run by the test below")
TOL = {FP32: 4e-6, FP16: 2e-3}  # fp16: a product's factors are rounded to it
SMALL = channel(4, 32, rotation="head"), mapped(4, 0, rotation="group")
FORMS = {  # keys, values, head dimension; the number of a head's tokens is a multiple
    "exact": (None, None, 80, 1),
    "small": (*SMALL, 64, 32),
    "balanced": (channel(4, 64, rotation="head"), mapped(2, 0, rotation="group"), 128, 64),
    "kivi": (channel(2, 32), token(2, 32, "fp8"), 64, 32),
    "2 bit, exact values": (channel(2, 32), None, 64, 32),
    "exact keys, 3 bit": (None, token(3, 0, "fp8"), 32, 8),
    "8 bit, 1.5 bit": (channel(8, 32, "bf16"), token(1.5, 16), 96, 160),
}
ROWS = {  # tokens of heads, in units
    "one row": [[3, 0, 7]],
    "rows": [[1, 3], [0, 2], [9, 0]],
    "one head": [[0, 0], [0, 11]],
}


@pytest.mark.slow
@pytest.mark.skipif(interpreter.INTERPRETED, reason="this is the run")
def test_in_the_interpreter():
    interpreter.run(__file__)


def made(form, counts, dtype=FP32):
    """Return the region of heads with so many units, and the same in fp32."""
    kfmt, vfmt, d, unit = form
    where = spans(unit * torch.tensor(counts))
    total = int(where.bounds[..., 1].sum())
    sides = [span_view(fmt, total, d, dtype, seed) for seed, fmt in enumerate((kfmt, vfmt))]
    exact = [KVView(None, x) for _, x in sides]
    return Region(*(view for view, _ in sides), where), Region(*exact, where)


def agrees(form, counts, dtype=FP32, *, group=3, t=1, before=(), softcap=None, visible=None):
    """The kernel's state is the reference's over the unpacked tokens, in fp32.

    before: regions and the same in fp32, in front of the spans.
    """
    region, exact = (x._replace(visible=visible) for x in made(form, counts, dtype))
    rows, heads = len(counts), len(counts[0])
    q = draw((rows, group * heads, t, form[2]), 3, dtype)
    regions = [*(x for x, _ in before), region]
    done = dispatch.ran["attend", "gpu", ""]
    with dispatch.use("gpu"):
        found = ops.attend(q, regions, 0.125, softcap=softcap)
    assert dispatch.ran["attend", "gpu", ""] == done + 1
    want = attend_regions(q.float(), [*(x for _, x in before), exact], 0.125, softcap=softcap)
    torch.testing.assert_close(found.out, want.out, rtol=0, atol=TOL[dtype])
    torch.testing.assert_close(found.lse, want.lse, rtol=TOL[dtype], atol=TOL[dtype])
    return want


@needs_interpreter
@pytest.mark.sample
@pytest.mark.parametrize("dtype", [FP32, FP16])
@pytest.mark.parametrize("counts", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_head_reads_its_own_tokens(form, counts, dtype):
    want = agrees(form, counts, dtype)
    empty = (torch.tensor(counts) == 0).repeat_interleave(3, dim=1)
    assert (want.lse[..., 0].isneginf() == empty).all()


@needs_interpreter
@pytest.mark.parametrize("processors", [2, 7, 100])
@pytest.mark.parametrize("form", ["exact", "small"])
def test_any_number_of_splits(form, processors, monkeypatch):
    """Spans begin within tiles, and short heads have fewer splits than long ones."""
    monkeypatch.setattr(decode, "processors", lambda device: processors)
    counts = [[1, 40], [5, 2]] if form == "small" else [[33, 700], [100, 1]]
    agrees(FORMS[form], counts)


@needs_interpreter
@pytest.mark.parametrize("heads", [4, 8])
def test_splits_have_equal_work_however_long_the_heads_are(heads, monkeypatch):
    """The grid has a program a split of the longest head; those that work have equally many tiles.

    The work is divided by the tokens of all heads, so that one long head does not slow the others.
    """
    monkeypatch.setattr(decode, "processors", lambda device: 16)
    region, _ = made(FORMS["small"], [[1] * (heads - 1) + [32]])
    q = torch.zeros(1, heads, 1, 64)
    call = decode.call(
        q, *region[:2], 0.125, False, None, decode.Masks(None, None), region.where, 0,
        region.where.longest,
    )  # fmt: skip
    tile, each = call.constants["BN0"], call.arguments["tiles0"]
    working = [-(-(count // tile) // each) for count in region.where.bounds[0, :, 1].tolist()]
    assert 16 <= sum(working) <= 16 * decode.WAVES + heads
    assert working[-1] <= call.splits <= working[-1] + 1


@needs_interpreter
@pytest.mark.parametrize(("group", "t"), [(1, 1), (5, 3), (9, 8)])
def test_any_number_of_query_rows(group, t):
    agrees(FORMS["small"], ROWS["rows"], group=group, t=t)


@needs_interpreter
def test_masks_and_softcap():
    form, counts = FORMS["small"], [[1, 3], [2, 5]]
    visible = torch.rand(2, 2, 160, generator=torch.Generator().manual_seed(1)) > 0.3
    visible[0] = False
    want = agrees(form, counts, visible=visible, softcap=2.0)
    assert want.lse[0].isneginf().all()


@needs_interpreter
@pytest.mark.parametrize("t", [1, 4])
@pytest.mark.parametrize("tokens", [20, 100])
def test_spans_are_merged_with_other_regions(tokens, t):
    """As `small` attends: a segment, of which a prefix is packed or none, then the spans."""
    store = resolve("small").store
    sides = [KVSide(fmt, 32) for fmt in (store.keys, store.values)]
    for seed, side in enumerate(sides):
        side.extend(draw((2, 2, tokens, 64), 5 + seed), 0, prompt=True)
    views = [side.kv_view() for side in sides]
    exact = Region.exact(*(view.tensor() for view in views), step_tokens=t)
    before = Region(*views, step_tokens=t), exact
    agrees(FORMS["small"], [[1, 3], [0, 2]], t=t, before=[before])


@needs_interpreter
@pytest.mark.parametrize("name", ["small", "tiny", "full"])
def test_a_cache_attends_by_no_reference(name):
    """Heads compete by lengths of keys, as in `small` and `tiny` by other scores."""
    recipe = replace(families.ragged(), store=resolve(name).store)
    sizes = [150, 1, 1, 3, 1]
    q, k, v = steps.draw(0, sum(sizes), batch=2, hq=4, hk=2)
    k = k * torch.tensor([1.0, 1.1]).view(2, 1, 1)
    outs = []
    for backend in ("gpu", "ref"):
        before = dispatch.ran.copy()
        with dispatch.use(backend), torch.no_grad():
            cache = LayerCache(recipe)
            outs.append(steps.feed(cache, q, k, v, sizes))
        ran = dispatch.ran - before
        if backend == "gpu":
            assert ran["attend", "gpu", ""] == 4
            assert not any(op == "attend" and by == "ref" for op, by, _ in ran)
    bounds = probe.ragged(cache).spans.bounds
    assert len(set(bounds[..., 1].flatten().tolist())) > 1
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


def test_what_the_kernel_does_not_read():
    like = torch.zeros(1, 1, 0, 64)

    def problems(keys=None, values=None, t=1):
        views = (KVView(None, like, fmt and fmt.encoding) for fmt in (keys, values))
        return gpu.problems(torch.zeros(1, 2, t, 64), [Region(*views, spans([[0, 0]]))])

    assert problems(*SMALL) == []
    assert problems(Packed(2, "token", 32, pre_rope=True)) == [
        "keys: pre_rope=True is not supported"
    ]
    assert problems(None, Packed(2, "token", 32, clip=0.9)) == [
        "values: channels of a layer's heads that are grouped or scaled together"
    ]
    assert problems(t=9) == ["more than 8 queries a step"]
