"""The sample of a grid: every pair occurs, few cases are needed, and it is the same every time."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from for_each import for_each
from pairwise import axes, cover, left_out

SIZES = [(2, 2, 2), (3, 4, 5), (6, 4, 3, 2), (13, 9), (7,), (4, 4, 4, 4, 4)]


def grid(sizes, allowed=lambda case: True):
    names = [f"axis {i}" for i in range(len(sizes))]
    cases = (dict(zip(names, x, strict=True)) for x in itertools.product(*map(range, sizes)))
    return [case for case in cases if allowed(case)]


def combinations(cases, strength):
    return {
        chosen
        for case in cases
        for chosen in itertools.combinations(sorted(case.items()), strength)
    }


@for_each("strength", [1, 2, 3])
@for_each("sizes", SIZES)
def test_every_combination_that_a_grid_contains_is_in_the_sample(sizes, strength):
    cases = grid(sizes, lambda case: sum(case.values()) % 5)
    sample = [cases[i] for i in cover(cases, strength)]
    strength = min(strength, len(sizes))
    assert combinations(sample, strength) == combinations(cases, strength)


@for_each(("sizes", "most"), [((4, 4, 4), 20), ((6, 4, 3, 2), 28), ((3,) * 8, 21)])
def test_a_sample_of_pairs_is_small(sizes, most):
    cases = grid(sizes)
    sample = cover(cases)
    assert len(sample) <= most < len(cases)
    assert sample == cover(cases) == sorted(set(sample))


def test_a_sample_of_values_is_as_long_as_the_longest_axis():
    assert len(cover(grid((5, 3, 4)), strength=1)) == 5


def test_a_grid_of_two_axes_has_no_pair_to_spare():
    assert cover(grid((4, 3))) == list(range(12))


def test_no_cases_give_no_sample():
    assert cover([]) == []


def spec(**params):
    """A pytest callspec."""
    return SimpleNamespace(params=params)


def test_parameters_that_change_together_are_one_axis():
    grid = [(i, j) for i in range(3) for j in range(2)]
    found = axes([spec(case=i, message=[i, "no hash"], other=j) for i, j in grid])
    assert found == [{"case": i, "other": j} for i, j in grid]


def test_values_without_a_hash_are_distinguished_too():
    found = axes([spec(a=[0], b=0), spec(a=[1], b=0), spec(a=[0], b=1)])
    assert found == [{"a": "[0]", "b": 0}, {"a": "[1]", "b": 0}, {"a": "[0]", "b": 1}]


class Marked:
    """A pytest item as `left_out` reads it."""

    def __init__(self, test, case, *kinds):
        self.nodeid = f"{test}[{case}]"
        self.callspec = spec(**case)
        self.marks = [SimpleNamespace(args=(kind,)) for kind in kinds]

    def get_closest_marker(self, name):
        return self.marks[0] if name == "sample" and self.marks else None


def test_what_is_left_out_is_of_marked_tests_only_and_each_has_its_own_sample():
    cases = [dict(zip("abc", x, strict=True)) for x in itertools.product(range(3), repeat=3)]
    marked = {kind: [Marked(kind, case, kind) for case in cases] for kind in ("pairs", "values")}
    plain = [Marked("plain", case) for case in cases]
    backends = [
        Marked("law", {"recipe": i, "kernels": kernels}) for i in range(20) for kernels in "ab"
    ]
    out = left_out([*marked["pairs"], *plain, *marked["values"], *backends])
    kept = {kind: [x for x in items if x not in out] for kind, items in marked.items()}
    assert len(kept["pairs"]) == 9
    assert len(kept["values"]) == 3
    assert not set(out) & set(plain)
    law = [x.callspec.params for x in backends if x not in out]
    assert [x["recipe"] for x in law] == list(range(20))
    assert 4 < sum(x["kernels"] == "a" for x in law) < 16
