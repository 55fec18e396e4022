"""Groups of channels that are alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.calibrate.ranges import group_channels, kmeans
from kvloom.store import Packed


def partition(of) -> set[frozenset[int]]:
    return {frozenset((of == g).nonzero().flatten().tolist()) for g in of.unique()}


def test_blobs_are_found_whatever_their_sizes():
    sizes, centers = [3, 40, 12, 9], torch.tensor([[0.0, 0], [30, 1], [-20, 20], [5, -40]])
    true = torch.arange(4).repeat_interleave(torch.tensor(sizes))
    points = centers[true] + 0.1 * torch.randn(64, 2)
    mixed = torch.randperm(64)
    assert partition(kmeans(points[mixed], 4)) == partition(true[mixed])


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_every_group_has_a_member_even_among_equal_points(n, count, different, seed):
    count = min(n, count)
    g = torch.Generator().manual_seed(seed)
    points = torch.randint(0, different, (n, 2), generator=g).double()
    of = kmeans(points, count)
    assert of.shape == (n,)
    assert of.unique().tolist() == list(range(count))


def test_the_same_ranges_give_the_same_groups():
    low, high = torch.randn(2, 2, 32).sort(dim=0).values
    assert torch.equal(
        group_channels(low, high, "layer", 16), group_channels(low, high, "layer", 16)
    )


@pytest.mark.parametrize(
    ("span", "size", "count"),
    [("layer", 16, 6), ("layer", 64, 1), ("head", 16, 6), ("head", 32, 3), ("head", 0, 3)],
)
def test_groups_are_as_many_as_predicted_and_stay_in_their_heads(span, size, count):
    low, high = torch.randn(2, 3, 32).sort(dim=0).values
    of = group_channels(low, high, span, size)
    assert of.unique().tolist() == list(range(count))
    assert Packed(2, "token", size, span=span).groups(3, 32) == count
    if span == "head":
        heads = [set(of[h].tolist()) for h in range(3)]
        assert sum(map(len, heads)) == len(set.union(*heads))
