"""kernels.quantize.reference against the float64 formula and a bit-by-bit packer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import naive
from kvloom.encoding import META
from kvloom.kernels.quantize import reference as ref
from kvloom.store import Packed

BITS = (1, 1.5, 2, 3, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = [
    (axis, group, dim)
    for axis in ("channel", "token")
    for group in (16, 32, 64, 128)
    for dim in (64, 80, 96, 128, 256)
    if axis == "channel" or dim % group == 0
]


def drawn(axis: str, group: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Tokens [1, 1, N, D] with outlier channels, one constant group; per token N fills no block."""
    g = torch.Generator().manual_seed(seed + group + dim)
    n = 2 * group if axis == "channel" else 5
    x = torch.randn(1, 1, n, dim, generator=g) * torch.logspace(-2, 2, dim)
    x[..., :group, :group] = 0.3  # constant whichever way the group runs
    return x.to(dtype)


def check_against_naive(x, bits, axis, group, meta):
    """One head x [1, 1, N, D]: metadata, codes, error and inverse, all against float64."""
    codes, scale, zero = ref.quantize(x, bits, axis, group, META[meta])
    back = ref.dequantize(codes, scale, zero, axis, group)
    every = max(1, x.shape[3] // 32) if axis == "channel" else 1  # channels are independent: some
    exact, scale, zero, back, codes = (
        a[0, 0, :, ::every].double().numpy() for a in (x, scale, zero, back, codes)
    )
    _, true_scale, true_zero = naive.quantize(exact, bits, axis, group)
    true_high = true_zero + naive.top(bits) * true_scale
    true_scale = np.vectorize(naive.holdable)(true_scale, meta)
    top = naive.top(bits)

    # the zero is the minimum, rounded once; the scale an fp32 quotient, rounded once
    info = torch.finfo(META[meta])
    np.testing.assert_array_equal(zero, np.vectorize(naive.META[meta])(true_zero))
    half_ulp = np.maximum(true_scale * info.eps, info.smallest_normal * info.eps) / 2
    assert (np.abs(scale - true_scale) <= half_ulp * (1 + 1e-6) + 2**-22 * true_scale).all()

    # the codes are naive's with the stored metadata; only a quotient that fp32 cannot tell from a
    # half may go either way
    quotient = naive.quotients(exact, scale, zero, axis, group)
    clear = np.abs(quotient - np.floor(quotient) - 0.5) > 1e-6 * (1 + np.abs(quotient))
    want = np.clip(np.rint(quotient), 0, top)
    np.testing.assert_array_equal(codes[clear], want[clear])
    assert np.abs(codes - want).max() <= 1

    # x' is code * scale + zero, and off by half a step at most; where the rounded metadata does not
    # span the group any more, by the distance from the group's end to the nearest level
    size = 2**-22 * np.abs(exact).max()
    np.testing.assert_allclose(
        back, naive.dequantize(codes, scale, zero, axis, group), rtol=0, atol=size
    )
    bound = np.maximum(scale / 2, np.maximum(zero - true_zero, true_high - zero - top * scale))
    error, (n, d) = np.abs(back - exact), exact.shape
    by_group = (n // group, group, d) if axis == "channel" else (n, d // group, group)
    assert (error.reshape(by_group).max(1 if axis == "channel" else 2) <= bound + size).all()
    return back


@pytest.mark.sample
@pytest.mark.parametrize(("axis", "group", "dim"), FORMATS)
@pytest.mark.parametrize("meta", META)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_is_the_formula(axis, group, dim, meta, dtype):
    for bits in BITS:
        check_against_naive(drawn(axis, group, dim, dtype), bits, axis, group, meta)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_error_is_at_most_half_a_step_with_exact_metadata(bits, axis):
    x = torch.rand(2, 3, 64, 64)
    codes, scale, zero = ref.quantize(x, bits, axis, 32, torch.float32)
    back = ref.dequantize(codes, scale, zero, axis, 32)
    dim = 2 if axis == "channel" else 3
    step = scale.repeat_interleave(32, dim=dim)
    assert ((x - back).abs() <= step / 2 + 2**-22).all()


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("meta", META)
@pytest.mark.parametrize(
    "values",
    [
        (65504.0, -65504.0, 0.0, 1.0),  # the largest fp16 numbers
        (65504.0, 65472.0, 65440.0, 65504.0),
        (6e-8, 0.0, 1.2e-7, 1.8e-7),  # subnormal in fp16: the scale may vanish
        (6.1e-5, -6.1e-5, 6e-8, 0.0),
        (-0.0, 0.0, 0.0, 0.0),
    ],
)
def test_extremes_of_fp16_stay_finite_and_within_bounds(axis, meta, values):
    values = torch.tensor(values)
    if meta == "fp8":  # the largest it can hold, and so that a scale of 1 bit is held too
        values = values.clamp(-224, 224)
    x = values.repeat(16)[torch.randperm(64)].to(torch.float16)
    x = x.repeat(32, 1)[None, None].contiguous()
    for bits in BITS:
        # one bit's scale is the whole range: twice the largest number would not fit
        held = x / 2 if bits == 1 and meta == "fp16" else x
        back = check_against_naive(held, bits, axis, 32, meta)
        assert np.isfinite(back).all()


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", BITS)
def test_a_constant_group_comes_back_as_its_zero(axis, bits):
    x = torch.full((1, 2, 32, 32), 0.3, dtype=torch.float16)
    codes, scale, zero = ref.quantize(x, bits, axis, 16, torch.float16)
    assert not codes.any()
    assert not scale.any()
    assert torch.equal(ref.dequantize(codes, scale, zero, axis, 16), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("pads", [(0, 5), (16, 31), (3, 48)])
def test_padding_does_not_widen_a_groups_range(bits, pads):
    """Scale and zero of a group are those of its real tokens; without any, both are 0."""
    real = torch.arange(48) >= torch.tensor(pads)[:, None, None]
    above = torch.tensor([10.0, -10.0, 10.0]).view(3, 1, 1)  # or below, so that 0 is beyond an end
    x = (torch.randn(2, 3, 48, 20) + above).masked_fill(~real[..., None], 0.0)
    codes, scale, zero = ref.quantize(x, bits, "channel", 16, torch.float32, real)
    back = ref.dequantize(codes, scale, zero, "channel", 16)
    for row, pad in enumerate(pads):
        for g in range(3):
            group = x[row, :, max(pad, 16 * g) : 16 * (g + 1)]
            if group.shape[1] == 0:
                assert not scale[row, :, g].any()
                assert not zero[row, :, g].any()
                continue
            low, high = group.amin(dim=1), group.amax(dim=1)
            assert torch.equal(zero[row, :, g], low)
            torch.testing.assert_close(scale[row, :, g], (high - low) / ref.top(bits))
        step = scale[row].repeat_interleave(16, dim=1)[:, pad:]
        assert ((back - x)[row, :, pad:].abs() <= step / 2 + 2**-18).all()


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("n", [0, 16, 48])
def test_batch_rows_and_heads_are_quantized_apart(axis, n):
    x = torch.randn(3, 2, n, 48)
    whole = ref.quantize(x, 2, axis, 16, torch.float16)
    for i in range(3):
        for h in range(2):
            alone = ref.quantize(x[i : i + 1, h : h + 1], 2, axis, 16, torch.float16)
            for a, b in zip(whole, alone, strict=True):
                assert torch.equal(a[i : i + 1, h : h + 1], b)


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("every", [1, 2])
def test_memory_layout_of_the_input_does_not_matter(axis, every):
    x = torch.randn(2, 64, 3, 128).transpose(1, 2)[:, :, ::every, ::every]
    got, want = (ref.quantize(y, 4, axis, 16, torch.float16) for y in (x, x.contiguous()))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bits", BITS)
def test_packing_codes_is_the_stated_layout_and_is_undone(bits):
    for tokens in (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33):
        codes = torch.randint(0, ref.top(bits) + 1, (2, 3, tokens, 5), dtype=torch.uint8)
        packed = ref.pack_codes(codes, bits)
        assert packed.dtype == torch.uint8
        assert packed.shape == (2, 3, ref.rows_for(tokens, bits), 5)
        one, its_bytes = codes[1, 2].numpy(), packed[1, 2].numpy()
        np.testing.assert_array_equal(its_bytes, naive.pack(one, bits))
        assert torch.equal(ref.unpack_codes(packed, bits, tokens), codes)
        np.testing.assert_array_equal(naive.unpack(its_bytes, bits, tokens), one)


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_of_whole_atoms_means_something(bits):
    rows = 6 * ref.PACK_BLOCK[bits][1]
    values = 3**5 if bits == 1.5 else 256
    packed = torch.randint(0, values, (1, 2, rows, 7), dtype=torch.uint8)
    tokens = 6 * ref.PACK_BLOCK[bits][0]
    codes = ref.unpack_codes(packed, bits, tokens)
    assert int(codes.max()) <= naive.top(bits)
    assert torch.equal(ref.pack_codes(codes, bits), packed)


@given(
    bits=st.sampled_from(BITS),
    lengths=st.tuples(st.integers(0, 20), st.integers(0, 20)),
    seed=st.integers(0, 99),
)
def test_packing_whole_atoms_apart_is_packing_them_together(bits, lengths, seed):
    per_block = ref.PACK_BLOCK[bits][0]
    a, b = lengths[0] * per_block, lengths[1]
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, ref.top(bits) + 1, (1, 1, a + b, 3), dtype=torch.uint8, generator=g)
    apart = [ref.pack_codes(codes[:, :, :a], bits), ref.pack_codes(codes[:, :, a:], bits)]
    assert torch.equal(torch.cat(apart, dim=2), ref.pack_codes(codes, bits))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_bytes_are_what_the_format_says(subtests, bits, axis):
    for meta, dim in itertools.product(META, (64, 128)):
        with subtests.test(meta=meta, dim=dim):
            fmt = Packed(bits, axis, 32, meta, residual=32)
            for tokens in (0, 32, 96) if axis == "channel" else (0, 1, 5, 7, 8, 33):
                x = torch.randn(1, 1, tokens, dim)
                codes, scale, zero = ref.quantize(x, bits, axis, 32, META[meta])
                held = (ref.pack_codes(codes, bits), scale, zero)
                assert fmt.nbytes(tokens, dim) == sum(x.nbytes for x in held)
            # whole pack blocks: exactly the effective bits of a value
            assert fmt.nbytes(160, dim) * 8 == pytest.approx(fmt.bits_per_value() * 160 * dim)


# --- groups of any channels of any heads ---------------------------------------------------------

ALPHA = torch.tensor([1.0, 0.9, 0.85, 0.97, 1.0, 0.8])


def scattered(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Six groups of unequal sizes, one of a single channel, strewn over all heads."""
    sizes = torch.tensor([1, 3, 17, 5, 20, heads * dim - 46])
    g = torch.Generator().manual_seed(seed)
    group_of = torch.empty(heads * dim, dtype=torch.long)
    group_of[torch.randperm(heads * dim, generator=g)] = torch.arange(6).repeat_interleave(sizes)
    return group_of.view(heads, dim)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("alpha", [1.0, 0.9, ALPHA], ids=["unclipped", "clipped", "each clipped"])
def test_scattered_groups_are_the_formula(subtests, bits, alpha):
    x = drawn("token", 16, 48, torch.float32).expand(2, 3, -1, -1)
    group_of = scattered(3, 48)
    x = x * torch.tensor([1.0, -2.0, 0.3]).view(3, 1, 1)
    for meta, dtype in META.items():
        with subtests.test(meta):
            codes, scale, zero = ref.quantize_mapped(x, bits, group_of, dtype, alpha)
            assert codes.shape == x.shape
            assert scale.shape == zero.shape == (2, 1, x.shape[2], 6)
            assert int(codes.max()) <= naive.top(bits)
            back = ref.dequantize_mapped(codes, scale, zero, group_of)
            clip = np.asarray(alpha, dtype=np.float32)
            want, true_scale, true_zero = naive.mapped(
                x[0].double().numpy(), bits, group_of.numpy(), meta, clip
            )
            ulp = torch.finfo(dtype).eps
            np.testing.assert_allclose(scale[1, 0].float().numpy(), true_scale, rtol=ulp, atol=1e-6)
            np.testing.assert_allclose(zero[0, 0].float().numpy(), true_zero, rtol=ulp, atol=1e-6)
            if meta == "fp32":  # no rounding of metadata: only ties may go either way
                step = ref.per_channel(scale, group_of)[0].numpy()
                off = np.abs(back[0].numpy() - want)
                assert (off <= step * (1 + 1e-5)).all()
                assert (off > 1e-4).mean() < 0.01


@pytest.mark.parametrize("bits", BITS)
def test_consecutive_groups_of_a_head_are_a_case_of_scattered_ones(bits):
    x = drawn("token", 16, 64, torch.float32).expand(2, 3, -1, -1).contiguous()
    group_of = torch.arange(12).repeat_interleave(16).view(3, 64)
    codes, scale, zero = ref.quantize_mapped(x, bits, group_of, torch.float16)
    plain = ref.quantize(x, bits, "token", 16, torch.float16)
    assert torch.equal(codes, plain[0])
    for got, want in ((scale, plain[1]), (zero, plain[2])):
        assert torch.equal(got[:, 0], want.transpose(1, 2).flatten(2))


def test_error_of_clipped_groups_is_half_a_step_inside_and_the_overhang_outside():
    x, group_of = torch.rand(1, 2, 9, 32) * 4 - 2, scattered(2, 32)
    codes, scale, zero = ref.quantize_mapped(x, 3, group_of, torch.float32, 0.8)
    back = ref.dequantize_mapped(codes, scale, zero, group_of)
    step, low = ref.per_channel(scale, group_of), ref.per_channel(zero, group_of)
    beyond = (low - x).clamp_min(0) + (x - low - 7 * step).clamp_min(0)
    assert ((x - back).abs() <= torch.maximum(step / 2, beyond) + 1e-5).all()
    assert (beyond > step).any()
