"""KVSide: when tokens move from the exact tail into the packed prefix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvloom.store import KVSide, Packed

LANES = {
    "exact": (None, 0),
    "keys of kivi": (Packed(2, "channel", 32, residual=32), 0),
    "values of kivi": (Packed(2, "token", 32), 32),
    "nothing exact": (Packed(3, "token", 16), 0),
    "five codes a byte": (Packed(1.5, "token", 16, "fp32"), 3),
    "a block and a window": (Packed(4, "channel", 16, residual=48), 10),
}
every_lane = pytest.mark.parametrize(("fmt", "recent"), LANES.values(), ids=LANES)


def parts(side: KVSide) -> list[torch.Tensor]:
    """All that a side holds."""
    exact = [side.tail.view()] if len(side.tail) else []
    return [*exact, *side.packed.live] if side.packed_count else exact


@every_lane
@given(st.lists(st.integers(1, 80), min_size=1, max_size=5), st.booleans())
def test_taking_is_appending_and_sealing(fmt, recent, sizes, one_by_one):
    x = torch.randn(2, 1, sum(sizes), 32)
    taken, packed_end = KVSide(fmt, recent), KVSide(fmt, recent)
    for part in x.split(sizes, dim=2):
        taken.extend(part, drop=0)
        for piece in part.split(1, dim=2) if one_by_one else [part]:
            packed_end.tail.append(piece)
            packed_end.pack()
    assert len(taken) == len(packed_end) == sum(sizes)
    for a, b in zip(parts(taken), parts(packed_end), strict=True):
        assert torch.equal(a, b)
    want = 0 if fmt is None else fmt.to_pack(sum(sizes), recent)
    assert taken.packed_count == packed_end.packed_count == want


@every_lane
def test_the_tail_is_the_newest_tokens_bit_by_bit(fmt, recent):
    x = torch.randn(1, 2, 150, 32)
    side = KVSide(fmt, recent)
    side.extend(x, drop=0)
    exact = len(side.tail)
    assert exact >= recent
    if exact:
        assert torch.equal(side.tail.view(), x[:, :, 150 - exact :])


@every_lane
@pytest.mark.parametrize("n", [40, 150])
def test_views_of_both_parts_are_the_tokens(fmt, recent, n):
    x = torch.randn(1, 2, n, 32)
    side = KVSide(fmt, recent)
    side.extend(x, drop=0)
    view, count = side.kv_view(), side.packed_count
    assert torch.equal(view.tensor(n, n), x[:, :, n:])
    if count:
        packed = view.tensor(0, count)
        assert 0 < (packed - x[:, :, :count]).abs().max() < 2
        assert torch.equal(view.tensor(3, count - 1), packed[:, :, 3:-1])
    assert torch.equal(view.tensor(count, n), x[:, :, count:])


def test_dropping_while_taking_forgets_the_oldest():
    x = torch.randn(1, 1, 50, 8)
    side = KVSide(None, 0)
    side.extend(x[:, :, :30], drop=10)
    assert torch.equal(side.tail.view(), x[:, :, 10:30])
    side.extend(x[:, :, 30:], drop=25)
    assert torch.equal(side.tail.view(), x[:, :, 35:])


@every_lane
def test_tokens_dropped_on_the_way_in_are_never_packed(fmt, recent):
    x = torch.randn(1, 1, 150, 32)
    dropping, without = KVSide(fmt, recent), KVSide(fmt, recent)
    dropping.extend(x, drop=10)
    without.extend(x[:, :, 10:], drop=0)
    for a, b in zip(parts(dropping), parts(without), strict=True):
        assert torch.equal(a, b)


@every_lane
def test_a_long_prompt_never_enters_the_tail_whole(fmt, recent):
    side = KVSide(fmt, recent)
    side.extend(torch.randn(1, 1, 1000, 32), drop=0)
    assert side.tail.allocation.data.shape[2] == 1000 - side.packed_count
    assert side.tail.allocation.data.untyped_storage().nbytes() == side.tail.nbytes
    per_token = 0 if fmt is None else fmt.nbytes(side.packed_count, 32)
    assert side.nbytes == per_token + (1000 - side.packed_count) * 32 * 4
