"""Buffer: a growing tensor that neither copies every step nor keeps what it does not need."""

from __future__ import annotations

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.store.buffer import Buffer

ROOM = 16  # tokens of spare room made at least


class Counted(Buffer):
    """Counts reallocations and the tokens they copy."""

    def __init__(self) -> None:
        super().__init__()
        self.moves = self.copied = 0

    def _make_room(self, own, t: int) -> None:
        self.moves, self.copied = self.moves + 1, self.copied + len(self)
        super()._make_room(own, t)

    def _shrink(self) -> None:
        before = self.allocation.data
        super()._shrink()
        if self.allocation.data is not before:
            self.moves, self.copied = self.moves + 1, self.copied + len(self)


def tokens(first: int, n: int) -> torch.Tensor:
    """Tokens [2, 1, n, 3] that are their own number."""
    return torch.arange(float(first), first + n)[None, None, :, None].expand(2, 1, n, 3)


operations = st.lists(
    st.tuples(
        st.sampled_from(["append", "drop_front", "drop_back", "map", "replace"]),
        st.integers(0, 90),
    ),
    max_size=30,
)


@settings(max_examples=60)
@given(operations)
def test_a_buffer_is_a_list_of_tokens(operations):
    buffer, model, count = Buffer(), [], 0
    buffer.append(tokens(0, 0))
    for what, n in operations:
        if what == "append":
            buffer.append(tokens(count, n))
            model += range(count, count + n)
            count += n
        elif what == "drop_front":
            n = min(n, len(model))
            buffer.drop_front(n)
            model = model[n:]
        elif what == "drop_back":
            n = min(n, len(model))
            buffer.drop_back(n)
            model = model[: len(model) - n]
        elif what == "map":
            buffer.map(lambda x: x.flip(0))
        else:
            buffer.replace(tokens(count, n))
            model, count = list(range(count, count + n)), count + n
            assert buffer.nbytes == 2 * 1 * n * 3 * 4  # no spare room
        assert len(buffer) == len(model)
        assert buffer.view().shape == (2, 1, len(model), 3)
        assert buffer.view()[1, 0, :, 2].tolist() == model
        assert buffer.nbytes == buffer.allocation.data.nbytes <= 2 * 3 * 4 * (4 * len(model) + 200)


@pytest.mark.parametrize("step", [1, 7])
def test_growing_copies_each_token_a_bounded_number_of_times(step):
    buffer, n = Counted(), 6000
    for i in range(0, n, step):
        buffer.append(tokens(i, step))
    assert buffer.copied <= 17 * n  # a sixteenth of room at a time: 16 copies, and the new one
    assert buffer.moves <= n // ROOM


@pytest.mark.parametrize("window", [1, 16, 128, 1000])
def test_a_sliding_window_seldom_moves_and_does_not_grow(window):
    buffer, steps = Counted(), 2000
    buffer.append(tokens(0, window))
    for i in range(steps):
        buffer.append(tokens(i, 1))
        buffer.drop_front(1)
        room = max(ROOM, (window + 1) // 16)
        assert buffer.allocation.data.shape[2] <= window + 1 + room
    assert buffer.moves <= steps // ROOM + 1


def test_within_its_room_a_buffer_keeps_its_storage():
    buffer = Buffer()
    buffer.append(tokens(0, 100))
    buffer.append(tokens(100, 1))  # makes room
    storage = buffer.allocation.data.data_ptr()
    for i in range(ROOM):
        buffer.append(tokens(101 + i, 1))
        assert buffer.allocation.data.data_ptr() == storage
    buffer.append(tokens(101 + ROOM, 1))
    assert buffer.allocation.data.shape[2] == 102 + 2 * ROOM


def test_room_is_a_sixteenth_of_a_long_buffer():
    buffer = Buffer()
    buffer.append(tokens(0, 3199))
    buffer.append(tokens(3199, 1))
    assert buffer.allocation.data.shape[2] == 3200 + 200


@pytest.mark.parametrize("drop", ["drop_front", "drop_back"])
def test_memory_of_dropped_tokens_is_given_back(drop):
    buffer = Counted()
    buffer.append(tokens(0, 1000))
    full = buffer.nbytes
    getattr(buffer, drop)(990)
    assert buffer.nbytes <= full * 11 // 100
    assert buffer.view()[0, 0, :, 0].tolist() == (
        list(range(990, 1000)) if drop == "drop_front" else list(range(10))
    )


def test_dropping_one_by_one_does_not_copy_every_time():
    buffer = Counted()
    buffer.append(tokens(0, 1000))
    for _ in range(1000):
        buffer.drop_front(1)
    assert buffer.moves <= 5
    assert len(buffer) == 0


def test_a_buffer_holds_a_copy():
    x = tokens(0, 4).clone()
    buffer = Buffer()
    buffer.append(x)
    x.zero_()
    assert buffer.view()[0, 0, :, 0].tolist() == [0, 1, 2, 3]
    held = torch.randn(1, 1, 100, 4)
    buffer.replace(held[:, :, 90:])
    stored = buffer.allocation.data.untyped_storage().nbytes()
    assert stored == 10 * 4 * 4  # not the 100 tokens after it


def step(buffer: Buffer, drops: int, t: int) -> None:
    """Drop tokens and append others, so that the buffer grows."""
    if drops:
        buffer.drop_front(drops)
    buffer.append(tokens(1000, t))


@pytest.mark.parametrize("drops_in_step", [0, 3])
@pytest.mark.parametrize("dropped_before", [0, 5])
def test_a_copy_of_the_attributes_restores_a_buffer_that_grew(dropped_before, drops_in_step):
    buffer = Buffer()
    buffer.append(tokens(0, 40))
    if dropped_before:
        buffer.drop_front(dropped_before)
    before, old = dict(vars(buffer)), weakref.ref(buffer.allocation.data)
    want = buffer.view().clone()
    step(buffer, drops_in_step, 100)
    step(buffer, 0, 500)
    freed = old() is None
    assert freed == (drops_in_step == 0)  # else the copy needs the tokens that were dropped
    vars(buffer).clear()
    vars(buffer).update(before)
    assert torch.equal(buffer.view(), want)


def test_an_empty_buffer_holds_nothing():
    buffer = Buffer()
    assert (len(buffer), buffer.nbytes) == (0, 0)
    buffer.map(lambda x: x[:0])
    with pytest.raises(AssertionError, match="no shape yet"):
        buffer.view()
