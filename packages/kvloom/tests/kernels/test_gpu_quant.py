"""kernels.quantize.triton against the reference, bit by bit, in Triton's interpreter.

The interpreter must be asked for before Triton is imported, so pytest runs this file once more.
"""

from __future__ import annotations

import itertools

import pytest
import torch

import interpreter
from bound_encodings import bound, layer_encoding
from kvloom.encoding import META
from kvloom.kernels import dispatch, ops
from kvloom.kernels.quantize import reference as ref
from kvloom.kernels.quantize import triton as gpu
from kvloom.kernels.quantize.reference import PackedTensors, RopeAngles
from kvloom.positions.rope import Rope
from kvloom.store import Packed

FP32, FP16 = torch.float32, torch.float16
DIMS = {"channel": ((16, 80), (32, 64), (128, 16)), "token": ((16, 80), (32, 96), (80, 80))}
CASES = [
    (bits, axis, meta, (torch.float32, torch.float16, torch.bfloat16)[i % 3], *DIMS[axis][i % 3])
    for i, (bits, axis, meta) in enumerate(
        itertools.product((1, 1.5, 2, 3, 4, 8), ("channel", "token"), META)
    )
    if (i // 4 + i // 8 + i) % 2  # every other of the metadata's dtypes
]


def storage(b, h, tokens, d, spec, poison):
    """Room for `tokens` tokens in larger storage, all of it `poison`."""
    encoding, (rows, numbers) = spec.encoding, spec.scales
    lines = tokens // encoding.tokens_per_scale
    codes = torch.full(
        (b, h, ref.rows_for(tokens, encoding.bits) + 3, d), poison, dtype=torch.uint8
    )
    meta = torch.uint8 if spec.meta == torch.float8_e4m3fn else spec.meta
    scale, zero = (torch.full((b, rows, lines + 2, numbers), poison, dtype=meta) for _ in "sz")
    if encoding.rotation == "group":
        zero = zero[..., :0]
    return PackedTensors(codes[:, :, :-3], scale[:, :, :-2], zero[:, :, :-2])


def same(got, want):
    if want.element_size() == 1:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    assert got.shape == want.shape
    assert torch.equal(got, want)


def check(x, spec, real=None, step=1e-6):
    """Pack in two calls and unpack a stretch: as the reference does all at once.

    Between them, an undone step has packed other tokens.
    """
    b, h, n, d = x.shape
    encoding, (codes, scale, zero) = spec.encoding, ref.to_codes(x.float(), spec, real)
    held = storage(b, h, n, d, spec, 113)
    cut = n // 2 // encoding.tokens_per_scale * encoding.tokens_per_scale
    for lo, hi, sign in ((0, cut, 1), (cut, n, -1), (cut, n, 1)):
        upto = PackedTensors(
            held.codes[:, :, : ref.rows_for(hi, encoding.bits)],
            *(m[:, :, : hi // encoding.tokens_per_scale] for m in held[1:]),
        )
        here = None if real is None else real[:, :, lo:hi]
        gpu.pack(sign * x[:, :, lo:hi], spec, upto, lo, here)
    same(held.codes, ref.pack_codes(codes, encoding.bits))
    if spec.static is None:
        same(held.scale, scale)
        same(held.zero, zero)
    for lo, hi, dtype in ((0, n, FP32), (3, n - 2, FP16)):
        got = gpu.unpack(held, spec, lo, hi, dtype)
        want = ref.from_codes(codes, scale, zero, spec).to(dtype)[:, :, lo:hi]
        if spec.meta == FP32 or spec.static is not None or spec.divisor is not None:
            # the interpreter rounds code * scale + zero twice
            torch.testing.assert_close(got, want, rtol=step, atol=step * float(x.abs().max()))
        else:
            same(got, want.contiguous())


if interpreter.INTERPRETED:

    def test_a_head_size_of_its_own_is_a_case_of_its_own():
        encoding, scales = Packed(2, "token", 0, rotation="group").encoding, torch.empty(1, 1, 4, 1)
        for d in (64, 96, 64):
            layer_encoding = encoding.bind(1, d)
            room = PackedTensors(
                torch.zeros(1, 1, 1, d, dtype=torch.uint8), scales, scales[..., :0]
            )
            with dispatch.use("gpu"):
                packs = ops.pack.choose(torch.zeros(1, 1, 4, d), layer_encoding)
                unpacks = ops.unpack.choose(room, layer_encoding, 0, 4, FP32)
            for chosen in (packs, unpacks):
                assert ("96 rotated" in chosen.why) == (d == 96)

    @pytest.mark.parametrize(("bits", "axis", "meta", "dtype", "group", "dim"), CASES)
    def test_groups_of_a_head(bits, axis, meta, dtype, group, dim):
        g = torch.Generator().manual_seed(dim)
        n = 2 * group if axis == "channel" else 13
        x = torch.randn(2, n, 2, dim, generator=g) * torch.logspace(-2, 2, dim)
        x = x.to(dtype).transpose(1, 2)
        x[..., :group, :3] = 0.25  # constant groups
        real = None
        if axis == "channel" and bits != 4:
            real = torch.arange(n) >= torch.tensor([0, group + 3])[:, None, None]
        spec = bound(x, bits, axis, group, meta)
        step = 1e-6 if dtype == FP32 else 1e-3
        check(x, spec, real, step)

    @pytest.mark.parametrize("extra", ["", "clip", "smooth", "static"])
    @pytest.mark.parametrize(("bits", "meta"), [(2, "fp8"), (1.5, "fp16"), (3, "fp32")])
    def test_groups_of_any_channels(extra, bits, meta):
        g = torch.Generator().manual_seed(7)
        group_of = (torch.randperm(96, generator=g) // 20).view(2, 48)
        more = {"clip": {"clip": "group"}, "smooth": {"smooth": True}, "static": {"static": True}}
        fmt = Packed(bits, "token", 16, meta, span="layer", reorder=True, **more.get(extra, {}))
        low = -torch.rand(5, generator=g) - 1
        x = torch.randn(2, 2, 11, 48, generator=g)
        layer = layer_encoding(
            fmt,
            x,
            group_of=group_of,
            clip=torch.rand(5, generator=g) * 0.2 + 0.8 if extra == "clip" else None,
            divisor=torch.rand(2, 48, generator=g) + 0.5 if extra == "smooth" else None,
            low=low,
            high=-low,
        )
        check(x, layer, step=1e-3)

    @pytest.mark.parametrize("meta", META)
    @pytest.mark.parametrize(
        ("rotation", "bits", "axis", "group", "dim"),
        [
            ("group", 4, "token", 64, 64), ("group", 2, "token", 16, 48),
            ("group", 1.5, "token", 16, 16), ("group", 3, "token", 128, 128),
            ("group", 8, "token", 32, 32), ("group", 1, "token", 16, 16),
            ("head", 4, "channel", 32, 64), ("head", 2, "token", 16, 32),
        ],
    )  # fmt: skip
    def test_rotated_channels(rotation, bits, axis, group, dim, meta):
        g = torch.Generator().manual_seed(dim + group)
        n = 2 * group if axis == "channel" else 13
        x = torch.randn(2, n, 2, dim, generator=g) * torch.logspace(-2, 2, dim)
        x = x.half().transpose(1, 2)
        x[0, 0, 3] = 0.0
        spec = bound(x, bits, axis, group, meta, rotation=rotation)
        check(x, spec, step=1e-3)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_tokens_are_turned_before_and_back_after(interleaved):
        g = torch.Generator().manual_seed(1)
        x = torch.randn(1, 2, 32, 48, generator=g)
        spec = bound(x, 4, "channel", 16, FP16)
        rope = Rope(0.1 * torch.randn(16, generator=g).abs(), interleaved)
        at = torch.arange(5, 37).expand(1, 1, -1)
        back, there = (RopeAngles(*rope.angles(p), interleaved) for p in (-at, at))
        held = storage(1, 2, 32, 48, spec, 9)
        gpu.pack(x, spec, held, 0, None, back)
        codes, scale, zero = ref.quantize(rope.rotate(x, -at), 4, "channel", 16, FP16)
        same(held.codes, ref.pack_codes(codes, 4))
        want = rope.rotate(ref.dequantize(codes, scale, zero, "channel", 16), at)
        assert torch.equal(gpu.unpack(held, spec, 0, 32, FP32, there), want)

    def test_halves_are_rounded_to_even():
        x = torch.arange(0, 8, 0.5).repeat(4).view(1, 1, 4, 16)
        spec = bound(x, 3, "token", 16, FP32)
        x[..., -1] = 7.0  # scale 1
        held = storage(1, 1, 4, 16, spec, 9)
        gpu.pack(x, spec, held, 0)
        got = ref.unpack_codes(held.codes, 3, 4)
        assert got[0, 0, 0].tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 7]

else:

    @pytest.mark.slow
    def test_in_the_interpreter():
        interpreter.run(__file__)

    def test_what_is_not_covered_is_said():
        rotated = bound(torch.zeros(1, 1, 1, 48), 2, "token", 48, FP16, rotation="group")
        said = gpu.COVERAGE.problems(rotated, torch.float64)
        assert "48 rotated channels are not a power of 2" in said
        assert any("float64" in s for s in said)
