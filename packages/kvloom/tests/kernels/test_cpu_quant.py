"""kernels.quantize.cpu against the reference, to the last bit: every format, any shape and layout.

Two kernels take all formats, so nothing is compiled a case and everything is drawn.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bound_encodings import bound
from kvloom.encoding import META, Encoding, LayerEncoding
from kvloom.kernels import dispatch, ops
from kvloom.kernels.quantize import reference as ref
from kvloom.kernels.quantize import triton as triton_pack
from kvloom.kernels.quantize.cpu import pack as cpu
from kvloom.kernels.quantize.hadamard import rotate
from kvloom.kernels.quantize.reference import PackedTensors, RopeAngles
from kvloom.positions.rope import Rope
from kvloom.store import Packed

BITS = (1, 1.5, 2, 3, 4, 8)
pack = ops.pack.backends["cpu"].run
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 77  # what bytes hold that nobody may write
EDGE = 3  # so many rows of them behind each head


def every_format(test):
    """Run a test on all metadata and dtypes, by default on a sample; each case takes all bits."""
    for name, values in (("meta", META), ("dtype", DTYPES)):
        test = pytest.mark.parametrize(name, values, ids=str)(test)
    return pytest.mark.sample(test)


@pytest.fixture(autouse=True)
def _auto():
    dispatch.ran.clear()
    with dispatch.use("auto"):
        yield


def draw(shape, dtype=torch.float32, seed=0, layout="plain"):
    """Tokens with outlier channels and a constant stretch, laid out in one way or another."""
    g = torch.Generator().manual_seed(seed)
    b, h, n, d = shape
    x = torch.randn(shape, generator=g) * torch.logspace(-2, 2, d)
    x[:, :, : n // 3, : d // 2] = 0.3
    x = x.to(dtype)
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every other":
        wide = torch.full((b, h, 2 * n, 2 * d), torch.nan, dtype=dtype)
        wide[:, :, ::2, ::2] = x
        return wide[:, :, ::2, ::2]
    if layout == "rows alike":
        return x[:1, :1].expand(b, h, n, d)
    return x


def scattered(heads, dim, groups, seed):
    """The group of each channel: sizes differ, all heads together, none empty."""
    g = torch.Generator().manual_seed(seed)
    group_of = torch.randint(0, groups, (heads * dim,), generator=g)
    group_of[torch.randperm(heads * dim, generator=g)[:groups]] = torch.arange(groups)
    return group_of.view(heads, dim)


def mapped(x, bits, meta, groups=5, seed=0, static=False, smooth=True, clip=None):
    """An encoding like SKVQ's, with everything a calibration may say."""
    heads, dim = x.shape[1], x.shape[3]
    by_group = isinstance(clip, torch.Tensor)
    name = next(n for n, dtype in META.items() if dtype == meta)
    encoding = Encoding(
        bits, "token", 16, name, span="layer", reorder=True, smooth=smooth, static=static,
        clip=1.0 if static or clip is None else "group" if by_group else clip,
    )  # fmt: skip
    return LayerEncoding(
        encoding, heads, dim, scattered(heads, dim, groups, seed),
        clip=clip if by_group else None,
        divisor=torch.logspace(-1, 1, dim).repeat(heads, 1) if smooth else None,
        low=-torch.linspace(0, 2, groups), high=torch.linspace(0, 3, groups),
    )  # fmt: skip


def raw(x):
    """Metadata as bits, which tell -0 from 0."""
    return x.float().view(torch.int32)


def room(x):
    """Storage like x with a guarded edge behind each head, and the whole of it."""
    b, h, n, d = x.shape
    if not d:  # nothing is stored
        return x, x.new_full((1, 1, 0, 0), GUARD)
    whole = torch.full((b, h, n + EDGE, d * x.element_size()), GUARD, dtype=torch.uint8)
    return whole.view(x.dtype)[:, :, :n], whole


def agrees(x, spec, cuts=(), real=None, stretch=None):
    """What the kernel packs, in parts, and unpacks is the reference's, and nothing else moves."""
    codes, scale, zero = ref.to_codes(x.float(), spec, real)
    want = (ref.pack_codes(codes, spec.encoding.bits), scale, zero)
    (held_codes, *held_meta), wholes = zip(*(room(w) for w in want), strict=True)
    held = PackedTensors(held_codes, *held_meta)
    plain = PackedTensors(*(torch.zeros_like(part) for part in want))
    assert not cpu.COVERAGE.problems(spec, x.dtype)
    for lo, hi in itertools.pairwise([0, *cuts, x.shape[2]]):
        here = None if real is None else real[:, :, lo:hi]
        pack(x[:, :, lo:hi], spec, held, lo, here)
        ref.pack(x[:, :, lo:hi], spec, plain, lo, here)
    for got, by_reference, wanted in zip(held, plain, want, strict=True):
        assert torch.equal(raw(got), raw(wanted))
        assert torch.equal(raw(by_reference), raw(wanted))
    for part, whole in zip(held, wholes, strict=True):
        assert (whole[:, :, part.shape[2] :] == GUARD).all()
    lo, hi = stretch or (0, x.shape[2])
    got = cpu.unpack(held, spec, lo, hi, x.dtype)
    exact = ref.from_codes(codes, scale, zero, spec).to(x.dtype)[:, :, lo:hi]
    assert torch.equal(ref.unpack(plain, spec, lo, hi, x.dtype), exact)
    if spec.meta == torch.float32 and spec.encoding.rotation != "group":
        # whether torch rounds a product and a sum once or twice is its own affair
        size = exact.float().abs().max() if exact.numel() else 0.0
        tol = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}[x.dtype]
        torch.testing.assert_close(got, exact, rtol=tol, atol=float(size) * 2**-22)
    else:
        assert torch.equal(got, exact)


PLAIN = [
    (axis, group, dim)
    for axis, group, dim in itertools.product(
        ("channel", "token"), (16, 32, 64, 128), (80, 128, 256)
    )
    if axis == "channel" or dim % group == 0
]


@every_format
@pytest.mark.parametrize(("axis", "group", "dim"), PLAIN)
def test_every_format(axis, meta, dtype, group, dim):
    x = draw((2, 2, 2 * group if axis == "channel" else 9, dim), dtype)
    for bits in BITS:
        agrees(x, bound(x, bits, axis, group, meta))


@every_format
@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_every_format_of_scattered_groups(meta, dtype, dim, static):
    x, clip = draw((2, 3, 11, dim), dtype), torch.linspace(0.8, 1.0, 5)
    for bits in BITS:
        agrees(x, mapped(x, bits, META[meta], static=static, clip=clip))


@every_format
@pytest.mark.parametrize(
    "size",
    [(128, 16), (128, 32), (64, 64), (256, 256), (80, 80), (96, 96), (120, 120), (20, 20)],
    ids=str,
)
def test_every_format_of_rotated_groups(meta, dtype, size):
    """Groups are powers of 2, or have an odd part: of whole vectors, or of less."""
    dim, group = size
    x = draw((2, 2, 9, dim), dtype)
    for bits in BITS:
        agrees(x, bound(x, bits, "token", group, meta, rotation="group"))


@pytest.mark.sample
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [128, 96, 80, 20])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_rotated_heads_are_quantized_by_range(bits, dtype, dim, axis):
    group = 16 if axis == "channel" else dim
    x = draw((2, 2, 48, dim), dtype)
    agrees(x, bound(x, bits, axis, group, "fp16", rotation="head"))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("meta", META)
def test_rotated_vectors_of_any_size(bits, meta):
    """None, of which fp32 has no square, rounded to no scale, and the largest that are let in."""
    fmt = Packed(bits, "token", 32, meta, rotation="group")
    some = torch.stack([torch.ones(32), torch.eye(32)[5], *rotate(torch.eye(32)).T.sign()[:3]])
    sizes = torch.tensor([0.0, 1e-38, 1e-30, 1e-23, 1e-20, 3e-8, 1e-4, fmt.max_abs])
    x = (sizes[:, None, None] * some).view(1, 1, -1, 32)
    agrees(x, bound(x, bits, "token", 32, meta, rotation="group"))


shapes = st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 8, 16, 20, 64, 80]))
layouts = st.sampled_from(["plain", "tokens first", "every other", "rows alike"])
formats = st.tuples(
    st.sampled_from(BITS), st.sampled_from(list(META.values())), st.sampled_from(DTYPES)
)
seeds = st.integers(0, 999)


@settings(max_examples=150)
@given(formats, shapes, layouts, st.lists(st.integers(0, 70), max_size=4), st.data())
def test_tokens_of_any_length_cut_anywhere(form, shape, layout, cuts, data):
    (bits, meta, dtype), (b, h, d) = form, shape
    cuts = sorted({min(c, 70) for c in cuts})
    n = data.draw(st.integers(cuts[-1] if cuts else 0, 90))
    lo = data.draw(st.integers(0, n))
    hi = data.draw(st.integers(lo, n))
    kind = data.draw(st.sampled_from(["none", "mapped", "group", "head"]))
    x = draw((b, h, n, d), dtype, n, layout)
    if kind == "mapped":
        groups = data.draw(st.integers(1, min(7, h * d)))
        static, smooth = data.draw(st.booleans()), data.draw(st.booleans())
        clip = data.draw(st.sampled_from([None, 0.9]))
        spec = mapped(x, bits, meta, groups, n, static, smooth, clip)
    else:
        group = data.draw(st.sampled_from([g for g in (16, 32, 64, d) if d % g == 0]))
        spec = bound(x, bits, "token", group, meta, rotation=kind)
    agrees(x, spec, cuts, stretch=(lo, hi))


@settings(max_examples=150)
@given(formats, shapes, layouts, st.lists(st.integers(1, 4), max_size=3), st.data())
def test_groups_of_tokens_with_padding_anywhere(form, shape, layout, parts, data):
    (bits, meta, dtype), (b, h, d) = form, shape
    group = data.draw(st.sampled_from([16, 32, 128]))
    ends = [group * e for e in itertools.accumulate(parts)]
    n = ends[-1] if ends else 0
    lo = data.draw(st.integers(0, n))
    hi = data.draw(st.integers(lo, n))
    x = draw((b, h, n, d), dtype, n, layout)
    real = None
    kind = data.draw(st.sampled_from(["none", "in front", "anywhere", "each head's"]))
    if kind == "in front":
        real = torch.arange(n) >= torch.randint(0, n + 1, (b, 1, 1))
    elif kind != "none":
        heads = h if kind == "each head's" else 1
        real = (torch.rand(n, heads, b) > 0.3).permute(2, 1, 0)
    rotation = data.draw(st.sampled_from([{}, {"rotation": "head"}]))
    spec = bound(x, bits, "channel", group, meta, **rotation)
    agrees(x, spec, ends[:-1], real, (lo, hi))


@settings(max_examples=80)
@given(formats, shapes, layouts, st.booleans(), st.data())
def test_keys_turned_before_and_after(form, shape, layout, interleaved, data):
    """As `rope` turns them: some of the channels, by a row's or a head's own positions."""
    (bits, meta, dtype), (b, h, d) = form, shape
    half, n = data.draw(st.integers(0, d // 2)), 16 * data.draw(st.integers(0, 4))
    rope = Rope(1000.0 ** -(torch.arange(half) / max(1, half)), interleaved)
    at = torch.randint(0, 5000, (n, data.draw(st.sampled_from([1, h])), b)).permute(2, 1, 0)
    kind = data.draw(st.sampled_from(["mapped", "channel", "token", "rotated"]))
    if kind != "rotated" and meta == torch.float32:
        meta = torch.float16  # of fp32, products are not all exact
    x = draw((b, h, n, d), dtype, n, layout)
    if kind == "mapped":
        spec = mapped(x, bits, meta, min(5, h * d), n)
    elif kind == "channel":
        spec = bound(x, bits, kind, 16, meta)
    else:
        spec = bound(x, bits, "token", d, meta, rotation="group" if kind == "rotated" else "none")
    codes, scale, zero = ref.to_codes(rope.rotate(x.float(), -at), spec)
    held = PackedTensors(*(room(w)[0] for w in (ref.pack_codes(codes, bits), scale, zero)))
    pack(x, spec, held, 0, rope=RopeAngles(*rope.angles(-at), interleaved))
    assert torch.equal(held.codes, ref.pack_codes(codes, bits))
    assert torch.equal(raw(held.scale), raw(scale))
    got = cpu.unpack(held, spec, 0, n, dtype, RopeAngles(*rope.angles(at), interleaved))
    flat = ref.from_codes(codes, scale, zero, spec)
    assert torch.equal(got, rope.rotate(flat, at).to(dtype))


@pytest.mark.parametrize("meta", META.values(), ids=META)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_scales_and_zeros_of_any_size_are_rounded_alike(meta, axis):
    """Subnormal, vanishing and, where a format has infinity, too large ones; and ties."""
    g = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=g)
    bits[::2] = bits[::2] >> 12 << 12  # 11 bits of mantissa: often half way between two numbers
    some = bits.int().view(torch.float32).nan_to_num(1.0, 1.0, 1.0).clamp(-1e38, 1e38)
    small = torch.randint(-(2**13), 2**13, (10_000,), generator=g) * 2.0**-15
    numbers = torch.cat([some, some.frexp()[0], small, small * 2.0**-12])
    x = torch.zeros(1, 1, len(numbers), 16)
    x[..., 3] = numbers  # scale is its size, zero is 0 or it
    x = x.transpose(2, 3) if axis == "channel" else x
    spec = bound(x, 1, axis, 16, meta)
    codes, *want = ref.to_codes(x, spec)
    held = PackedTensors(*(room(w)[0] for w in (ref.pack_codes(codes, 1), *want)))
    pack(x, spec, held, 0)
    assert torch.equal(raw(held.scale), raw(want[0]))
    assert torch.equal(raw(held.zero), raw(want[1]))


@pytest.mark.parametrize("values", [(65504.0, -65504.0, 1.0), (6e-8, 0.0, 1.8e-7), (-0.0, 0.0)])
def test_extremes_of_fp16(values):
    x = torch.tensor(values, dtype=torch.float16).repeat(64)[:64].expand(1, 1, 64, 64)
    for bits, axis in itertools.product(BITS[1:], ("channel", "token")):
        agrees(x, bound(x, bits, axis, 32, "fp16"))


def test_storage_that_is_not_in_rows_is_read_but_not_written_to():
    x = draw((2, 2, 32, 64))
    spec = bound(x, 2, "token", 32, "fp16")
    codes, scale, zero = ref.to_codes(x, spec)
    held = PackedTensors(ref.pack_codes(codes, 2), scale, zero)
    apart = PackedTensors(*(p.transpose(2, 3).contiguous().transpose(2, 3) for p in held))
    want = ref.from_codes(codes, scale, zero, spec)
    assert torch.equal(cpu.unpack(apart, spec, 0, 32, torch.float32), want)
    with pytest.raises(ValueError, match="must be contiguous"):
        pack(x, spec, apart, 0)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_does_not_point_into_the_original(again):
    x = draw((1, 2, 9, 32))
    spec = mapped(x, 2, torch.float16)
    agrees(x, spec)
    copied = again(spec)
    assert spec.prepared
    assert not copied.prepared
    agrees(x, copied)


@pytest.mark.parametrize("openmp", [True, False], ids=["OpenMP", "Python's threads"])
def test_threads_share_the_work(monkeypatch, openmp):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    if not openmp:
        from kvloom.kernels import cpu_runtime as team

        monkeypatch.setattr(team, "_openmp", lambda: None)
    x = draw((2, 2, 1920, 64), torch.bfloat16)
    for spec in (
        bound(x, 1.5, "channel", 128, "fp16"),
        bound(x, 3, "token", 32, "fp16"),
        mapped(x, 1.5, torch.float8_e4m3fn),
        bound(x, 3, "token", 64, "fp16", rotation="group"),
    ):
        agrees(x, spec, [128, 640])


@dataclass(frozen=True)
class Clustered(Encoding):
    centroids: int = 0


def test_an_encoding_that_kernels_do_not_know_is_refused_by_name():
    x = torch.zeros(1, 1, 1, 16)
    new = Clustered(4, "token", 16, centroids=8).bind(1, 16)
    for module in (cpu, triton_pack):
        problems = module.COVERAGE.problems(new, torch.float32)
        assert problems == ["centroids=8 is not supported"]
    assert ops.pack.choose(x, new).backend == "ref"
    known = Clustered(4, "token", 16).bind(1, 16)
    with dispatch.use("auto"):
        assert ops.pack.choose(x, known).kernel is not None
