"""A process with a part of the heads takes their calibrated numbers, or is refused."""

from __future__ import annotations

import pytest
import torch

from for_each import for_each
from kvloom.errors import CalibrationError
from kvloom.store import Packed, Transform
from kvloom.store.codec import Channels, codec, consecutive
from kvloom.store.rank_channels import of_heads

HEADS, D = 4, 32
G = torch.Generator().manual_seed(0)


def format_of(**options) -> Packed:
    return Packed(2, "token", 16, transform=Transform(**options))


def calibrated(fmt: Packed) -> Channels:
    """Random numbers of all heads; reordered groups have channels of one head."""
    groups = HEADS * D // 16
    group_of = consecutive(16, fmt.transform, HEADS, D)
    if fmt.transform.reorder:
        group_of = torch.stack([row[torch.randperm(D, generator=G)] for row in group_of])
    low = -torch.rand(groups, generator=G) - 1
    clip = None
    if fmt.transform.clip != 1.0:
        clip = torch.rand(groups if fmt.transform.clip == "group" else 1, generator=G) / 2 + 0.5
    divisor = torch.rand(HEADS, D, generator=G) + 0.5 if fmt.transform.smooth else None
    static = (low, low + 3) if fmt.transform.static else (None, None)
    return Channels(group_of, clip, divisor, *static)


@for_each(
    "options",
    [
        {"reorder": True, "clip": "group"}, {"clip": "layer"}, {"smooth": True},
        {"reorder": True, "static": True}, {"span": "layer", "clip": "group"},
    ],
    ids=str,
)  # fmt: skip
@for_each("first", [0, 1, 2])
def test_some_heads_are_packed_as_among_all(options, first):
    fmt = format_of(**options)
    every = calibrated(fmt)
    x = torch.randn(2, HEADS, 5, D, generator=G)
    some = slice(first, first + 2)
    part = of_heads(every, fmt, "keys", first, 2)
    whole, own = codec(fmt, every, x), codec(fmt, part, x[:, some])
    want = whole.dequantize(*whole.quantize(x, None), torch.float32)[:, some]
    codes, scale, zero = own.quantize(x[:, some], None)
    assert torch.equal(own.dequantize(codes, scale, zero, torch.float32), want)
    assert fmt.transform.static or scale.shape[-1] == fmt.groups(2, D)


def test_groups_that_reach_over_other_heads_are_refused():
    fmt = Packed(2, "token", 64, transform=Transform("layer", clip="group"))
    group_of = consecutive(64, fmt.transform, HEADS, D)  # heads 0 and 1, heads 2 and 3
    channels = Channels(group_of, torch.ones(2))
    assert of_heads(channels, fmt, "values", 2, 2).group_of.unique().tolist() == [0]
    with pytest.raises(CalibrationError, match=r"values: groups of span=.layer. .* 2 of 4"):
        of_heads(channels, fmt, "values", 1, 2)
    with pytest.raises(CalibrationError, match="use groups within a head"):
        of_heads(channels, fmt, "keys", 0, 1)
