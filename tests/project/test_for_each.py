"""Many values in one test: each combination runs by itself, and those that fail are named."""

from __future__ import annotations

import inspect
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each


class Noted:
    """Stands for pytest's `subtests`: notes what runs, and what fails."""

    def __init__(self):
        self.passed, self.failed = [], []

    @contextmanager
    def test(self, msg):
        try:
            yield
        except AssertionError:
            self.failed.append(msg)
        else:
            self.passed.append(msg)


def test_every_combination_runs_and_those_that_fail_are_named():
    @for_each("a", [1, 2])
    @for_each(("b", "c"), [(3, 4), (5, 6)], ids=["x", "y"])
    def check(a, b, c):
        assert (a, b, c) != (1, 5, 6)

    noted = Noted()
    check(noted)
    assert noted.passed == ["1, x", "2, x", "2, y"]
    assert noted.failed == ["1, y"]


def test_a_value_finds_an_empty_folder_the_same_seed_and_nothing_patched(tmp_path, monkeypatch):
    drawn = []

    @for_each("value", "abc", ids=str.upper)
    def check(value, tmp_path, monkeypatch):
        assert not list(tmp_path.iterdir())
        (tmp_path / "file").touch()
        assert not hasattr(torch, "patched")
        monkeypatch.setattr(torch, "patched", value, raising=False)
        drawn.append(torch.rand(1).item())

    noted = Noted()
    check(noted, tmp_path=tmp_path, monkeypatch=monkeypatch)
    assert noted.passed == ["A", "B", "C"]
    assert len(set(drawn)) == 1


def test_pytest_gives_what_no_list_gives():
    @for_each("value", [1])
    def check(value, tmp_path): ...

    assert list(inspect.signature(check).parameters) == ["tmp_path", "subtests"]


def test_hypothesis_draws_for_each_value():
    seen = set()

    @for_each("value", [1, 2])
    @given(st.integers(0, 9))
    def check(value, drawn):
        seen.add((value, drawn))

    check(Noted())
    assert {value for value, _ in seen} == {1, 2}
    assert len(seen) > 2


@pytest.mark.parametrize("ids", [[], ["a", "b"]])
def test_every_value_has_a_name(ids):
    with pytest.raises(AssertionError):
        for_each("value", [1], ids=ids)
