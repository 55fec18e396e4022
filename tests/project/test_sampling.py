"""The cases of a test that the default run takes have every value, and run by both backends."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from sampling import left_out, set_cover, slow_except


class Case:
    """A pytest item as `sampling` reads it."""

    def __init__(self, sampled, **params):
        self.sampled, self.callspec = sampled, SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return self.sampled


def grid(sampled=False, **values):
    every = itertools.product(*values.values())
    return [Case(sampled, **dict(zip(values, x, strict=True))) for x in every]


def kept(cases):
    out = left_out(cases)
    return [case.callspec.params for case in cases if case not in out]


@pytest.mark.parametrize("sizes", [(5, 3, 4), (7,), (2, 2, 2), (13, 9)], ids=str)
def test_a_sample_has_every_value_and_is_as_long_as_the_longest_axis(sizes):
    axes = {f"axis {i}": [[x] for x in range(n)] for i, n in enumerate(sizes)}
    sample = kept(grid(sampled=True, **axes))
    assert len(sample) == max(sizes)
    for name, values in axes.items():
        assert sorted({case[name][0] for case in sample}) == [x for (x,) in values]


def test_all_cases_of_other_tests_stay_unless_every_test_is_sampled():
    cases = grid(a=range(3), b=range(3))
    assert left_out(cases) == []
    assert len(left_out(cases, sample=True)) == 6


def test_each_case_runs_by_one_backend_and_the_test_by_both():
    cases = kept(grid(recipe=range(9), n=[[1], [2]], kernels=["auto", "ref"]))
    assert len(cases) == len({(x["recipe"], x["n"][0]) for x in cases}) == 18
    assert 4 < sum(x["kernels"] == "auto" for x in cases) < 14


def test_a_single_case_runs_by_both_backends():
    assert left_out(grid(recipe=["kivi"], kernels=["auto", "ref"])) == []


def test_a_case_that_one_backend_runs_stays():
    cases = [*grid(recipe=[0, 1], kernels=["auto", "ref"]), Case(False, recipe=2, kernels="ref")]
    assert cases[-1] not in left_out(cases)


def test_a_cover_of_a_grid_with_gaps_has_every_pair_in_few_cases():
    rows = [x for x in itertools.product(range(6), range(4), range(3), range(2)) if sum(x) % 5]
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    chosen = set_cover(pairs)
    assert set().union(*(pairs[i] for i in chosen)) == set().union(*pairs)
    assert len(chosen) <= 30 < len(rows)
    assert set_cover(pairs) == chosen


def test_named_values_are_slow_but_for_the_default_ones():
    values = slow_except({"small": 1, "large": 2}, "small")
    assert [(x.id, x.values, [mark.name for mark in x.marks]) for x in values] == [
        ("small", (1,), []),
        ("large", (2,), ["slow"]),
    ]
    with pytest.raises(AssertionError):
        slow_except(["small"], "huge")
