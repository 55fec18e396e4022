"""A process with a part of the heads takes their calibrated numbers, or is refused."""

from __future__ import annotations

import pytest
import torch

from bound_encodings import round_trip
from kvloom.errors import CalibrationError
from kvloom.kernels.quantize import reference as ref
from kvloom.store import LayerEncoding, Packed
from kvloom.store.calibration import of_heads

HEADS, D = 4, 32
G = torch.Generator().manual_seed(0)


def format_of(**options) -> Packed:
    return Packed(2, "token", 16, **options)


def calibrated(fmt: Packed) -> LayerEncoding:
    """Random numbers of all heads; reordered groups have channels of one head."""
    groups = HEADS * D // 16
    group_of = fmt.consecutive(HEADS, D)
    if fmt.reorder:
        group_of = torch.stack([row[torch.randperm(D, generator=G)] for row in group_of])
    low = -torch.rand(groups, generator=G) - 1
    clip = None
    if fmt.clip != 1.0:
        clip = torch.rand(groups if fmt.clip == "group" else 1, generator=G) / 2 + 0.5
    divisor = torch.rand(HEADS, D, generator=G) + 0.5 if fmt.smooth else None
    static = (low, low + 3) if fmt.static else (None, None)
    return LayerEncoding(fmt.encoding, HEADS, D, group_of, clip, divisor, *static)


@pytest.mark.parametrize(
    "options",
    [
        {"reorder": True, "clip": "group"}, {"clip": "layer"}, {"smooth": True},
        {"reorder": True, "static": True}, {"span": "layer", "clip": "group"},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("first", [0, 1, 2])
def test_some_heads_are_packed_as_among_all(options, first):
    fmt = format_of(**options)
    every = calibrated(fmt)
    x = torch.randn(2, HEADS, 5, D, generator=G)
    some = slice(first, first + 2)
    part = of_heads(every, "keys", first, 2)
    codes, scale, zero = ref.to_codes(x[:, some], part)
    assert torch.equal(ref.from_codes(codes, scale, zero, part), round_trip(x, every)[:, some])
    assert fmt.static or scale.shape[-1] == fmt.groups(2, D)


def test_groups_that_reach_over_other_heads_are_refused():
    fmt = Packed(2, "token", 64, span="layer", clip="group")
    group_of = fmt.consecutive(HEADS, D)  # heads 0 and 1, heads 2 and 3
    layer_encoding = LayerEncoding(fmt.encoding, HEADS, D, group_of, torch.ones(2))
    assert of_heads(layer_encoding, "values", 2, 2).group_of.unique().tolist() == [0]
    with pytest.raises(CalibrationError, match=r"values: groups of span=.layer. .* 2 of 4"):
        of_heads(layer_encoding, "values", 1, 2)
    with pytest.raises(CalibrationError, match="use groups within a head"):
        of_heads(layer_encoding, "keys", 0, 1)
