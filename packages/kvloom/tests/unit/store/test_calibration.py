"""Calibration files: written whole, read back, and refused in one sentence when they are wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from bound_encodings import round_trip
from kvloom.errors import CalibrationError
from kvloom.kernels.quantize import reference as ref
from kvloom.store import Packed
from kvloom.store.calibration import Calibration, checksum, format_of, group_ranges, shape_of
from mutations import flipped

REORDERED = Packed(2, "token", 16, span="layer", reorder=True, clip="group")
LOW = -torch.arange(1.0, 65).view(2, 32)


def made(**more) -> Calibration:
    group_of = torch.arange(64).view(2, 32) % 4
    tensors = {
        "range.0.values": torch.stack([LOW, LOW.abs() / 2]),
        f"groups.0.values.{shape_of(REORDERED)}": group_of.int(),
        f"clip.0.values.{format_of(REORDERED)}": torch.tensor([0.7, 0.8, 0.9, 1.0]),
        f"clip_layer.0.values.{format_of(REORDERED)}": torch.tensor([0.86]),
    }
    return Calibration({"model": "M"}, "abc", {"context": 8}, tensors | more)


def refused(path) -> str:
    with pytest.raises(CalibrationError) as error:
        Calibration.load(path)
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)
    return str(error.value)


def test_a_file_comes_back_as_it_was(tmp_path):
    path = tmp_path / "c.kvcal"
    made().save(path)
    read = Calibration.load(path)
    assert (read.model, read.text, read.settings) == ({"model": "M"}, "abc", {"context": 8})
    assert read.tensors.keys() == made().tensors.keys()
    assert all(torch.equal(read.tensors[n], x) for n, x in made().tensors.items())
    assert [p.name for p in tmp_path.iterdir()] == ["c.kvcal"]


def test_a_missing_file_says_how_to_make_one(tmp_path):
    assert "there is no calibration" in refused(tmp_path / "none.safetensors")
    assert "kvloom calibrate" in refused(tmp_path / "none.safetensors")


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_a_truncated_file_is_damaged(tmp_path, cut):
    path = tmp_path / "c.kvcal"
    made().save(path)
    path.write_bytes(path.read_bytes()[:cut])
    assert "damaged" in refused(path)


def test_one_wrong_byte_is_found_by_the_checksum(tmp_path):
    path = tmp_path / "c.kvcal"
    made().save(path)
    whole = bytearray(path.read_bytes())
    whole[-3] ^= 1
    path.write_bytes(whole)
    assert "its checksum is wrong" in refused(path)


def test_every_flipped_bit_of_the_header_is_found_too(tmp_path):
    path = tmp_path / "c.kvcal"
    made().save(path)
    whole = path.read_bytes()
    for bit in range(0, 8 * (8 + int.from_bytes(whole[:8], "little")), 5):
        path.write_bytes(flipped(whole, bit))
        with pytest.raises(CalibrationError):
            Calibration.load(path)


def test_a_file_of_a_former_version_has_a_checksum_of_its_tensors_alone(tmp_path):
    path, tensors = tmp_path / "c.kvcal", made().tensors
    about = {"version": 1, "model": {}, "text": "", "settings": {}, "sum": checksum(tensors)}
    save_file(tensors, path, {"kvloom_calibration": json.dumps(about)})
    assert Calibration.load(path).tensors.keys() == tensors.keys()
    del about["settings"]
    save_file(tensors, path, {"kvloom_calibration": json.dumps(about)})
    assert "no settings" in refused(path)
    save_file(tensors, path, {"kvloom_calibration": "[" * 100_000})
    assert "damaged" in refused(path)


def test_other_safetensors_and_other_versions_are_told_apart(tmp_path):
    other, later = tmp_path / "weights.safetensors", tmp_path / "later.safetensors"
    save_file({"w": torch.ones(2)}, other)
    assert "safetensors, but no calibration" in refused(other)
    about = {"version": 99, "model": {}, "text": "", "settings": {}, "sum": ""}
    save_file({"w": torch.ones(2)}, later, {"kvloom_calibration": json.dumps(about)})
    assert "has calibration format 99, this kvloom reads 1" in refused(later)


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    for nowhere in (tmp_path / "no folder" / "c.kvcal", tmp_path / "file" / "c.kvcal",
                    tmp_path, "."):  # fmt: skip
        with pytest.raises(CalibrationError, match="cannot be written"):
            made().save(nowhere)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_may_be_read_by_whom_the_user_lets_read_files(tmp_path):
    made().save(tmp_path / "c.kvcal")
    (tmp_path / "other").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_channels_of_a_format():
    found = made()
    assert found.encoding(0, "values", Packed(2, "token")) is None
    assert found.encoding(0, "values", Packed(2, "token", clip=0.9)) is None
    grouped = found.encoding(0, "values", REORDERED)
    assert grouped.group_of.tolist()[0][:5] == [0, 1, 2, 3, 0]
    torch.testing.assert_close(grouped.clip, torch.tensor([0.7, 0.8, 0.9, 1.0]))
    layer = Packed(2, "token", 16, span="layer", reorder=True, clip="layer")
    torch.testing.assert_close(found.encoding(0, "values", layer).clip, torch.tensor([0.86]))
    smooth = found.encoding(0, "values", Packed(2, "token", smooth=True))
    assert torch.equal(smooth.divisor, LOW.abs())
    static = Packed(2, "token", 32, span="head", static=True)
    fixed = found.encoding(0, "values", static)
    assert (fixed.low.tolist(), fixed.high.tolist()) == ([-32, -64], [16, 32])


@pytest.mark.parametrize(
    ("fmt", "says"),
    [
        (replace(REORDERED, bits=3), "values at 3 bit in groups of 16"),
        (replace(REORDERED, group=32), "values at 2 bit in groups of 32"),
        (Packed(2, "token", 16, clip="group"), "was not made for values"),
    ],
)
def test_a_format_that_was_not_calibrated_is_named(fmt, says):
    with pytest.raises(CalibrationError, match="kvloom calibrate") as error:
        made().encoding(0, "values", fmt)
    assert says in str(error.value)


def test_a_layer_or_kind_that_is_not_there_is_named():
    with pytest.raises(CalibrationError, match="has no ranges for the values of layer 7"):
        made().encoding(7, "values", REORDERED)
    before = Packed(2, "token", 16, smooth=True, pre_rope=True)
    with pytest.raises(CalibrationError, match="has no ranges for the raw keys of layer 0"):
        made().encoding(0, "keys", before)


def test_static_ranges_cost_no_metadata_and_clip_what_lies_outside():
    fmt = Packed(3, "token", 32, static=True)
    x = torch.zeros(1, 2, 3, 32)
    x[0, 0, 0, 0], x[0, 1, 2, 5] = 1000.0, -1000.0
    layer_encoding = made().encoding(0, "values", fmt)
    codes, scale, zero = ref.to_codes(x, layer_encoding)
    assert (scale.numel(), zero.numel()) == (0, 0)
    back = ref.from_codes(codes, scale, zero, layer_encoding)
    assert back[0, 0, 0, 0] == pytest.approx(16, rel=1e-3)
    assert back[0, 1, 2, 5] == pytest.approx(-64, rel=1e-3)
    assert fmt.bits_per_value() == 3
    assert fmt.nbytes(8, 32, heads=2) == 2 * 3 * 32


def test_dividing_channels_by_their_magnitude_is_undone():
    fmt = Packed(8, "token", 32, smooth=True)
    x = torch.randn(2, 2, 9, 32) * LOW.abs()[:, None]
    off = round_trip(x, made().encoding(0, "values", fmt)) - x
    # half a step of a range of at most about 8 in every channel's own unit
    assert (off.abs() <= LOW.abs()[:, None] * 10 / 255 / 2).all()


def test_ranges_of_groups_by_hand():
    low, high = torch.tensor([[-1.0, -5.0], [0.0, -2.0]]), torch.tensor([[1.0, 2.0], [3.0, 9.0]])
    lows, highs = group_ranges(low, high, torch.tensor([[0, 1], [1, 0]]))
    assert (lows.tolist(), highs.tolist()) == ([-2, -5], [9, 3])
    lows, highs = group_ranges(low - 10, high - 10, torch.tensor([[0, 1], [1, 0]]))
    assert (lows.tolist(), highs.tolist()) == ([-12, -15], [-1, -7]), "a range may leave 0 out"
