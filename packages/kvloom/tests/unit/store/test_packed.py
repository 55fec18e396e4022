"""PackedTokens and PackedView: codes that share bytes, appended and read at any place."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bound_encodings import layer_encoding, round_trip
from kvloom.errors import RecipeError
from kvloom.store import Packed
from kvloom.store.packed import PackedTokens

BITS = (1, 1.5, 2, 3, 4, 8)
FORMATS = [Packed(b, "token", 16) for b in BITS]
FORMATS += [Packed(b, "channel", 16, "fp32", residual=16) for b in BITS]
FORMATS += [Packed(2, "token", 32, "fp8"), Packed(1.5, "channel", 16, "fp8", residual=16)]
FORMATS += [Packed(2, "token", 64, "fp8", span="layer", clip=0.9)]
FORMATS += [Packed(3, "token", 0, rotation="group")]
names = [f"{f.bits} bit per {f.axis}, {f.meta}" for f in FORMATS]
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=names)


def held(fmt: Packed, x: torch.Tensor, sizes=None) -> PackedTokens:
    packed = PackedTokens(fmt)
    for part in x.split(x.shape[2] if sizes is None else sizes, dim=2):
        packed.append(part)
    return packed


def unit(fmt: Packed) -> int:
    """Tokens that must be packed together."""
    return fmt.group if fmt.axis == "channel" else 1


@every_format
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 99))
def test_appending_in_parts_is_appending_at_once(fmt, sizes, seed):
    sizes = [s * unit(fmt) for s in sizes]
    x = torch.randn(2, 2, sum(sizes), 32, generator=torch.Generator().manual_seed(seed))
    parts, whole = held(fmt, x, sizes), held(fmt, x)
    for a, b in zip(parts.live, whole.live, strict=True):
        assert torch.equal(a, b)
    assert len(parts) == len(whole) == sum(sizes)


@every_format
@settings(max_examples=30)
@given(st.data())
def test_any_stretch_unpacks_to_the_same_tokens(fmt, data):
    n = data.draw(st.integers(1, 9)) * unit(fmt) * (1 if fmt.axis == "channel" else 5)
    x = torch.randn(1, 2, n, 32)
    lo = data.draw(st.integers(0, n))
    hi = data.draw(st.integers(lo, n))
    packed = held(fmt, x)
    whole = round_trip(x, layer_encoding(fmt, x))
    assert torch.equal(packed.view().tensor(), whole)
    assert torch.equal(packed.view(lo, hi).tensor(), whole[:, :, lo:hi])


@pytest.mark.parametrize("tokens", [16, 48, 128])
@pytest.mark.parametrize("dim", [32, 64])
def test_bytes_of_packed_tokens_are_the_formats(tokens, dim):
    x = torch.randn(3, 2, tokens, dim)
    for fmt in FORMATS:
        assert held(fmt, x).nbytes == 3 * fmt.nbytes(tokens, dim, heads=2), fmt


def test_tokens_beyond_one_chunk_of_quantization_are_packed_alike(monkeypatch):
    x = torch.randn(1, 1, 160, 32)
    whole = [held(fmt, x) for fmt in FORMATS]
    monkeypatch.setattr("kvloom.store.packed._CHUNK", 64)
    for fmt, one in zip(FORMATS, whole, strict=True):
        chunked = held(fmt, x)
        assert torch.equal(chunked.live.codes, one.live.codes), fmt
        assert torch.equal(chunked.view().tensor(), one.view().tensor()), fmt


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_come_back_in_the_dtype_they_came_in(dtype):
    assert held(FORMATS[0], torch.randn(1, 1, 16, 32).to(dtype)).view().tensor().dtype == dtype


def test_map_acts_on_the_rows_of_all_parts():
    x = torch.randn(3, 2, 32, 32)
    for fmt in FORMATS:
        packed = held(fmt, x)
        packed.map(lambda t: t[[2, 0, 0]])
        assert torch.equal(packed.view().tensor(), held(fmt, x[[2, 0, 0]]).view().tensor()), fmt


def test_effective_bits_are_those_of_the_bytes():
    for fmt in FORMATS:
        assert fmt.nbytes(3840, 64) * 8 == pytest.approx(fmt.bits_per_value(64) * 3840 * 64), fmt


def test_effective_bits():
    assert Packed(1.5, "token", 32).bits_per_value() == pytest.approx(1.6 + 1)
    assert Packed(1.5, "token", 128, "fp8").bits_per_value() == pytest.approx(1.6 + 1 / 8)
    assert Packed(2, "token", 128, "fp8").bits_per_value() == 2.125
    assert Packed(3, "token", 0, rotation="group").bits_per_value(128) == 3.125
    with pytest.raises(RecipeError, match="give bits_per_value its head_dim"):
        Packed(3, "token", 0).bits_per_value()
    assert Packed(1, "token", 64, "fp8").bits_per_value() == 1.25
    assert Packed(2, "token", 32).bits_per_value() == 3
    assert Packed(2, "token", 16).bits_per_value() == 4
    assert Packed(2, "channel", 128, "fp32", residual=128).bits_per_value() == 2.5
    assert Packed(4, "token", 64, "bf16").bits_per_value() == 4.5


@pytest.mark.parametrize(
    ("block", "recent", "rows"),
    [
        # (tokens, packed): keys of KIVI, values of KIVI, and something between
        (32, 0, [(0, 0), (31, 0), (32, 32), (63, 32), (64, 64), (95, 64)]),
        (1, 32, [(0, 0), (31, 0), (32, 0), (33, 1), (64, 32)]),
        (32, 10, [(41, 0), (42, 32), (73, 32), (74, 64)]),
    ],
)
def test_how_many_tokens_a_schedule_packs(block, recent, rows):
    fmt = Packed(2, "channel" if block > 1 else "token", 32, residual=block)
    assert [(n, fmt.to_pack(n, recent)) for n, _ in rows] == rows


def test_units_are_those_of_a_first_prompt_alone():
    fmt = Packed(2, "channel", 16, residual=64, unit=16)
    tokens = (15, 16, 63, 64, 65, 127, 130)
    assert [fmt.to_pack(n, 0, prompt=True) for n in tokens] == [0, 16, 48, 64, 64, 112, 128]
    assert [fmt.to_pack(n, 0, prompt=False) for n in tokens] == [0, 0, 0, 64, 64, 64, 128]
