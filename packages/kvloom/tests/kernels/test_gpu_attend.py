"""kernels.attend.triton against the reference in fp32: every format, any shape, any mask.

In Triton's interpreter, which must be asked for before Triton is imported: so pytest runs this file
once more, in a process of its own. It proves arithmetic and indexing on tensors of the CPU; memory
that nobody has written is NaN. bf16 products are not what a GPU's are there, so models here are
fp32 and fp16.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import interpreter
import kv_views
import steps
from kv_views import attend, attend_chosen, draw, hidden
from kvloom.cache.layer import LayerCache
from kvloom.kernels import dispatch, ops
from kvloom.kernels.attend import reference as ref
from kvloom.kernels.attend.regions import KVView, Region
from kvloom.kernels.attend.triton import attend as gpu
from kvloom.kernels.attend.triton import decode
from kvloom.recipe.resolve import resolve
from kvloom.store import LayerEncoding, Packed
from kvloom.store.packed import PackedTokens

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
needs_interpreter = pytest.mark.skipif(not interpreter.INTERPRETED, reason="run by the test below")
TOL = {FP32: 4e-6, FP16: 2e-3}  # fp16: a product's factors are rounded to it
B, HK = 2, 2


@pytest.mark.slow
@pytest.mark.skipif(interpreter.INTERPRETED, reason="this is the run")
def test_in_the_interpreter():
    interpreter.run(__file__)


@pytest.mark.slow
@pytest.mark.skipif(interpreter.INTERPRETED, reason="this is the run")
def test_slow_cases_in_the_interpreter():
    interpreter.run(__file__, "slow")


def channel(bits, group=32, meta="fp16"):
    return Packed(bits, "channel", group, meta, residual=group)


def token(bits, group=32, meta="fp16", **more):
    return Packed(bits, "token", group, meta, **more)


def hadamard(bits, axis, group):
    return Packed(bits, axis, group, residual=group, rotation="head")


def channels(**which):
    """A calibration: groups of unequal size across heads, divisors, ranges."""
    g = torch.Generator().manual_seed(5)
    group_of = torch.cat([torch.arange(4), torch.randint(0, 4, (HK * 64 - 4,), generator=g)])
    known = {
        "group_of": group_of.view(HK, 64),
        "divisor": torch.rand(HK, 64, generator=g) + 0.5,
        "low": torch.full((4,), -2.0),
        "high": torch.full((4,), 2.5),
    }
    return tuple((name, known[name]) for name in which)


LAYER = {"span": "layer", "reorder": True}
FORMS = {  # keys, values, head dimension, dtype, calibration
    "kivi": (channel(2), token(2), 64, FP32, None),
    "kivi fp16": (channel(2), token(2), 64, FP16, None),
    "1 bit": (channel(1), token(1, 16, "bf16"), 64, FP32, None),
    "1.5 bit": (channel(1.5, 64, "fp8"), token(1.5, 32, "fp8"), 64, FP32, None),
    "3 bit": (channel(3, 16, "fp32"), token(3, 16, "fp32"), 80, FP16, None),
    "4 bit": (channel(4, 128), token(4, 16), 16, FP32, None),
    "8 bit": (channel(8, 128, "bf16"), token(8), 96, FP32, None),
    "axes swapped": (token(3), channel(4), 64, FP32, None),
    "mixed": (token(2, 32, "fp8"), token(1.5, 0), 96, FP32, None),
    "keys only": (token(8, 64, "fp32"), None, 256, FP16, None),
    "values only": (None, token(4, 16), 80, FP32, None),
    "exact": (None, None, 80, FP32, None),
    "rotated": (token(3, 0, rotation="group"), token(2, 16, "fp8", rotation="group"), 96, FP32,
                None),
    "rotated fp16": (hadamard(4, "channel", 32), token(4, 0, rotation="group"), 64, FP16, None),
    "levels fp16": (token(1, 16, rotation="group"), token(3, 0, "fp8", rotation="group"), 96, FP16,
                    None),
    "more levels fp16": (token(2, 0, rotation="group"), token(1.5, 32, rotation="group"), 64, FP16,
                         None),
    "keys rotated": (token(4, 32, rotation="group"), token(2), 64, FP32, None),
    "rotated ranges": (hadamard(4, "channel", 16), hadamard(3, "token", 32), 96, FP32, None),
    "skvq": (token(2, 32, "fp8", clip=0.9, **LAYER), token(1.5, 32, "fp8", clip=0.9, **LAYER),
             64, FP32, channels(group_of=1)),
    "smooth": (token(2, 32, smooth=True), token(4, 64, smooth=True), 64, FP32,
               channels(divisor=1)),
    "static": (token(2, 32, static=True, **LAYER), token(3, 32, static=True, **LAYER), 64, FP32,
               channels(group_of=1, low=1, high=1)),
}  # fmt: skip


def kv_view(fmt, packed_end, n, d, dtype, known, seed):
    """A view of n tokens of which about `packed_end` are packed, and all of them in fp32."""
    x = draw((B, HK, n, d), seed, dtype)
    if fmt is not None and fmt.axis == "channel":
        packed_end -= packed_end % fmt.group
    if fmt is None or not packed_end:
        return KVView(None, x, fmt and fmt.encoding), x.float()
    layer_encoding = known and LayerEncoding(fmt.encoding, HK, d, **dict(known))
    if layer_encoding and layer_encoding.group_of is None:
        layer_encoding = replace(layer_encoding, group_of=fmt.consecutive(HK, d))
    held = PackedTokens(fmt, layer_encoding)
    held.append(x[:, :, :packed_end].contiguous())
    view = held.view()
    if fmt.meta != "fp8":  # what lies after the last group is not read
        view = view._replace(
            scale=torch.nn.functional.pad(view.scale, (0, 0, 0, 1), value=torch.nan)[:, :, :-1],
            zero=torch.nn.functional.pad(view.zero, (0, 0, 0, 1), value=torch.nan)[:, :, :-1],
        )
    exact = torch.cat([view._replace(dtype=FP32).tensor(), x[:, :, packed_end:].float()], dim=2)
    return KVView(view, x[:, :, packed_end:], fmt.encoding), exact


problems = functools.partial(kv_views.problems, by=gpu.problems)


def both(form, n, packed_end, seed=0):
    kfmt, vfmt, d, dtype, known = form
    keys, k = kv_view(kfmt, packed_end[0], n, d, dtype, known, seed + 1)
    values, v = kv_view(vfmt, packed_end[1], n, d, dtype, known, seed + 2)
    return keys, values, k, v


def close(got, want, dtype=FP32):
    assert got.out.dtype == got.lse.dtype == FP32
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=TOL[dtype])
    torch.testing.assert_close(got.lse, want.lse, rtol=TOL[dtype], atol=TOL[dtype])


def agrees(form, hq, t, n, packed_end, **options):
    """The kernel's state is the reference's over the unpacked tokens, in fp32."""
    q = draw((B, hq, t, form[2]), 0, form[3])
    keys, values, k, v = both(form, n, packed_end)
    assert problems(t, keys.tail, keys.encoding, values.encoding) == []
    got = attend(q, keys, values, 0.125, by=gpu.attend, **options)
    close(got, ref.attend_exact(q.float(), k, v, 0.125, **options), form[3])


@needs_interpreter
@pytest.mark.sample
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("n", "packed_end"), [(141, (128, 70)), (133, (128, 133))], ids=["keys ahead", "values ahead"]
)
def test_every_format(form, n, packed_end):
    agrees(form, 4, 1, n, packed_end)


@needs_interpreter
@pytest.mark.parametrize("form", [FORMS["kivi"], FORMS["exact"]], ids=["kivi", "exact"])
@pytest.mark.parametrize(
    ("n", "packed_end"), [(0, (0, 0)), (1, (0, 0)), (1, (0, 1)), (64, (64, 64)), (65, (64, 65))]
)
def test_any_number_of_tokens(form, n, packed_end):
    agrees(form, 4, 1, n, packed_end)


@needs_interpreter
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of NaN
@pytest.mark.parametrize("form", [FORMS["kivi"], FORMS["exact"], FORMS["levels fp16"]])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_has_no_result(form, number):
    keys, values, _, _ = both(form, 133, (128, 70))
    q = draw((B, 4, 2, form[2]), 0, form[3])
    want = attend(q, keys, values, 0.125, by=gpu.attend)
    q[1, 2, 0, 5] = number
    got = attend(q, keys, values, 0.125, by=gpu.attend)
    assert got.out[1, 2, 0].isnan().all()
    got.out[1, 2, 0], got.lse[1, 2, 0] = want.out[1, 2, 0], want.lse[1, 2, 0]
    close(got, want, form[3])


@needs_interpreter
@pytest.mark.parametrize(("hq", "t"), [(2, 1), (10, 3), (18, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_rows(hq, t, causal):
    agrees(FORMS["kivi"], hq, t, 70, (64, 40), causal=causal)


@needs_interpreter
@pytest.mark.parametrize("form", [FORMS["kivi"], FORMS["rotated"]], ids=["kivi", "rotated"])
def test_masks_softcap_and_bias(form):
    hq, t, n, packed_end = 4, 2, 110, (96, 50)
    bias = torch.randn(B, hq, n, generator=torch.Generator().manual_seed(1))
    agrees(form, hq, t, n, packed_end, visible=hidden(B, 1, n), softcap=2.0, bias=bias[:1])
    agrees(form, hq, t, n, packed_end, visible=hidden(B, HK, n), causal=True, bias=bias)


@needs_interpreter
def test_attention_sinks():
    q, k, v = (draw((1, 4 if i == 0 else 2, n, 64), i) for i, n in enumerate((1, 100, 100)))
    regions, sinks = [Region.exact(k, v, step_tokens=1)], torch.tensor([0.5, -30.0, 40.0, 2.0])
    got = gpu.attend(q, regions, 0.1, sink_logits=sinks)
    want = ref.attend_regions(q, regions, 0.1, sink_logits=sinks)
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=2e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=2e-6, atol=2e-6)


@needs_interpreter
def test_one_program_or_many_give_the_same(monkeypatch):
    for processors in (2, 40):
        monkeypatch.setattr(decode, "processors", lambda device, n=processors: n)
        agrees(FORMS["kivi"], 2, 1, 400, (352, 330), visible=hidden(B, 1, 400))


@needs_interpreter
def test_memory_layout_does_not_matter():
    q, k, v = (draw((2, 4, n, 64), i) for i, n in enumerate((1, 100, 100)))
    want = ref.attend_exact(q, k, v, 0.1)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    apart = [torch.stack([x, x], dim=-1)[..., 0] for x in (q, k, v)]
    for a, b, c in (turned, apart):
        close(gpu.attend(a, [Region.exact(b, c)], 0.1), want)


@needs_interpreter
def test_huge_logits_neither_overflow_nor_lose_the_winner():
    q, k, v = (draw((2, 4, n, 64), i) for i, n in enumerate((1, 300, 300)))
    q, k = (q * 100).round(), (k * 40).round().clamp(-60, 60)
    got = gpu.attend(q, [Region.exact(k, v)], 0.5)
    want = ref.attend_exact(q, k, v, 0.5)
    assert want.lse.abs().max() > 1e4
    torch.testing.assert_close(got.out, want.out, rtol=0, atol=2e-6)
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=0)


@needs_interpreter
@pytest.mark.parametrize(
    ("form", "each"),
    [("kivi", True), ("3 bit", False), ("mixed", False), ("rotated", False),
     ("rotated fp16", False), ("levels fp16", True), ("skvq", False),
     ("exact", True)],
)  # fmt: skip
def test_chosen_tokens(form, each):
    form = FORMS[form]
    n, m, hq, ends = 100, 21, 4, (96, 80)
    q = draw((B, hq, 1, form[2]), 0, form[3])
    keys, values, k, v = both(form, n, ends)
    heads = hq if each else HK
    slots = torch.rand(B, heads, 80, generator=torch.Generator().manual_seed(3)).argsort(-1)
    first = tuple(draw((B, HK, 5, form[2]), i, form[3]) for i in (7, 8))
    slots, begin, total = slots[..., :m], 80, 5 + m + n - 80
    bias = torch.randn(1, hq, total, generator=torch.Generator().manual_seed(4))
    for options in ({}, {"visible": hidden(B, heads, total), "bias": bias, "first": first}):
        got = attend_chosen(q, keys, values, slots, begin, 0.125, by=gpu.attend, **options)
        options["first"] = [x.float() for x in options.get("first", ())] or None
        exact = KVView(None, k), KVView(None, v)
        want = attend_chosen(
            q.float(), *exact, slots, begin, 0.125, by=ref.attend_regions, **options
        )
        close(got, want, form[3])


WHOLE = (
    "full",
    "kivi:group=16,residual=32",
    "turbo:window=16",
    "skvq:pre_rope=false,reorder=false,clip=0.92,group=32,window=16",
    "minikv:group=16,residual=32",
    "streaming:tokens=24,sinks=4",
)


@needs_interpreter
@pytest.mark.parametrize("name", WHOLE)
def test_a_cache_attends_alike_by_these_kernels_and_by_the_reference(name):
    padded, recipe, sizes = name.startswith("kivi"), resolve(name), [50, 1, 1, 3, 20, 1, 1]
    q, k, v = steps.draw(0, sum(sizes), batch=2, hq=2, hk=1)
    visible = None
    if padded:
        visible = torch.ones(2, sum(sizes), dtype=torch.bool)
        visible[1, :17] = False
    outs = []
    for backend in ("gpu", "ref"):
        dispatch.ran.clear()
        with dispatch.use(backend), torch.no_grad():
            outs.append(steps.feed(LayerCache(recipe), q, k, v, sizes, visible))
            if backend == "gpu":
                assert dispatch.ran["attend", "gpu", ""] >= 4
    real = slice(17 if padded else 0, None)  # what padding attends to does not matter
    torch.testing.assert_close(outs[0][:, :, real], outs[1][:, :, real], rtol=0, atol=1e-5)


@needs_interpreter
def test_bf16_is_refused_by_the_interpreter():
    said = problems(1, torch.zeros(1, 1, 4, 64, dtype=BF16))
    assert said == ["Triton's interpreter multiplies bf16 wrongly; use fp32 or fp16 there"]


def test_what_is_not_covered_is_said(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    like = torch.zeros(1, 1, 4, 64)
    pre_rope = Packed(2, "token", 32, pre_rope=True)
    assert problems(1, like, channel(2).encoding, token(1.5, 0, "fp8").encoding) == []
    assert problems(1, like, pre_rope.encoding) == ["keys: pre_rope=True is not supported"]
    assert problems(1, like, None, token(2, 128).encoding) == [
        "values: group=128 does not divide head_dim=64"
    ]
    assert problems(9, torch.zeros(1, 1, 4, 8)) == [
        "head_dim=8 is not from 16 to 128 in torch.float32",
        "more than 8 queries a step",
    ]
    assert "float64" in problems(1, like.double())[0]


def test_without_a_gpu_the_setting_gpu_is_an_error_that_names_the_remedy(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.zeros(1, 1, 4, 64)
    with (
        dispatch.use("gpu"),
        pytest.raises(ValueError, match=r"tensors are on cpu.*set TRITON_INTERPRET=1"),
    ):
        ops.attend(x, [Region.exact(x, x)], 1.0)


def test_cuda_tensors_without_triton_are_left_to_the_reference_and_it_says_so(monkeypatch):
    from kvloom.kernels import triton_runtime as cuda

    monkeypatch.setattr(cuda, "_installed", lambda: False)
    monkeypatch.setattr(cuda, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "environment", lambda: "auto")

    class OnCuda:
        device = torch.device("cuda", 0)
        is_cpu = False

    why = "Triton is not installed; pip install triton"
    assert dispatch.candidate(OnCuda()) == ("gpu", [why])
    monkeypatch.setattr(cuda, "_installed", lambda: True)
    assert dispatch.candidate(OnCuda()) == ("gpu", [])
    monkeypatch.setattr(cuda, "_capability", lambda device: (7, 5))
    why = "the GPU's compute capability is below 8.0 (Ampere)"
    assert dispatch.candidate(OnCuda()) == ("gpu", [why])
