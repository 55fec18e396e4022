"""Uncommitted: what waits for a commit is saved whole, counted, and moves with its rows."""

from __future__ import annotations

import torch

from kvloom.cache.step import Queries, Uncommitted


def waiting() -> Uncommitted:
    q = torch.randn(2, 4, 3, 8)
    of_queries = {
        "ids": torch.tensor([[5, 6, 7], [8, 9, 10]]),
        "norms": torch.rand(2, 3),
        "later_seen": torch.tensor([[2, 1, 0], [0, 0, 0]]),
    }
    visible = torch.tensor([[True] * 9, [False] * 2 + [True] * 7])[:, None]
    return Uncommitted(3, Queries(q, 0.5, visible, 30.0, lse=torch.rand(2, 4, 3), **of_queries))


def assert_equal(one: Queries, other: Queries) -> None:
    for name, x in one._asdict().items():
        y = getattr(other, name)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, name


def test_queries_that_wait_are_saved():
    saved, loaded = waiting(), Uncommitted(0, Queries(torch.empty(2, 4, 0, 8), 1.0))
    loaded.load_state(saved.state(), None)
    assert loaded.tokens == 3
    assert_equal(saved.queries, loaded.queries)


def test_queries_that_wait_move_with_their_rows():
    moved = waiting()
    before = moved.queries
    moved.map(lambda x: x[1:])
    for name in ("q", "visible", "ids", "norms", "later_seen"):
        assert torch.equal(getattr(moved.queries, name), getattr(before, name)[1:]), name


def test_what_waits_counts_its_bytes():
    assert waiting().nbytes == 4 * 2 * 4 * 3 * 8 + (8 + 4 + 8) * 2 * 3  # no mask, no lse
