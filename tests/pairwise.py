"""Which cases of a parameter grid the default run takes: a greedy covering array.

A defect usually depends on the value of one parameter or on the values of two. A sample in which
every pair of values occurs finds such defects with a fraction of the cases. The remaining cases
carry the mark `slow`: they run with `-m slow`, or with all others by `-m ""`.

A test takes part by a mark above its stacked `pytest.mark.parametrize`:

    @pytest.mark.sample("pairs")   # every pair of values of two different axes, in some case
    @pytest.mark.sample("values")  # every value of every axis, in some case

Laws and tests of whole models run by two backends (`backends.kernels`). By default each of their
cases runs by one backend, and each test by both, unless a mark asks for a sample.

Each name of a `parametrize`, and each parametrized fixture, is an axis. Combinations that no case
contains need not occur.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

BACKEND = "kernels"
ONE_BACKEND = "one backend for each case"
STRENGTH = {"values": 1, ONE_BACKEND: 1, "pairs": 2}

Case = Mapping[str, Hashable]


def some_slow(
    axis: str, values: Mapping[str, object] | Sequence[str], *default: str, indirect: bool = False
):
    """Parametrize a test by named values; those whose names are not in `default` are slow.

    values: {name: value}, or the names alone. indirect: `axis` is a fixture that gets the value.
    Used where a sample should not choose: the default run takes the values that have the most
    features between them.
    """
    named = values if isinstance(values, Mapping) else {name: name for name in values}
    assert set(default) <= set(named)
    slow = {name: () if name in default else pytest.mark.slow for name in named}
    params = [pytest.param(value, id=name, marks=slow[name]) for name, value in named.items()]
    return pytest.mark.parametrize(axis, params, indirect=indirect)


def cover(cases: Sequence[Case], strength: int = 2) -> list[int]:
    """Return the indices of cases in which all combinations of `strength` axes occur.

    cases: {axis: value} each, all with the same axes. Only combinations that some case contains can
    occur. Each step takes the case that adds the most combinations. Of several such cases, a fixed
    shuffled order decides, so that a sample is spread over the grid and is the same every time.
    """
    parts = [_combinations(case, strength) for case in cases]
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)
    missing = set().union(*parts) if parts else set()
    gain = dict.fromkeys(order, float("inf"))  # an upper bound: what a case adds can only shrink
    taken = []
    while missing:
        best, best_gain = -1, 0
        for i in order:
            if gain[i] > best_gain:
                gain[i] = len(parts[i] & missing)
                if gain[i] > best_gain:
                    best, best_gain = i, gain[i]
        taken.append(best)
        missing -= parts[best]
    return sorted(taken)


def _combinations(case: Case, strength: int) -> set[tuple]:
    return set(itertools.combinations(sorted(case.items()), min(strength, len(case))))


def axes(callspecs: Sequence) -> list[Case]:
    """Return the cases as pytest's `callspec`s have them: {parameter: value}.

    A value that has no hash, such as a list, is represented by its text. Parameters that change
    together, such as a case and the message it is refused with, are one axis.
    """
    cases = [
        {name: x if isinstance(x, Hashable) else repr(x) for name, x in spec.params.items()}
        for spec in callspecs
    ]
    distinct: dict[tuple[int, ...], str] = {}
    for name in cases[0]:
        numbers: dict[Hashable, int] = {}
        column = tuple(numbers.setdefault(case[name], len(numbers)) for case in cases)
        distinct.setdefault(column, name)
    return [{name: case[name] for name in distinct.values()} for case in cases]


def left_out(items: Iterable) -> list:
    """Return the pytest items that the default run leaves out of its samples.

    Items that are slow on their own do not count: the sample is complete without them.
    """
    tests: dict[tuple, list] = {}
    for item in items:
        mark, slow = item.get_closest_marker("sample"), item.get_closest_marker("slow")
        if slow is None and (mark is not None or BACKEND in _params(item)):
            kind = ONE_BACKEND if mark is None else mark.args[0]
            tests.setdefault((item.nodeid.partition("[")[0], kind), []).append(item)
    found = []
    for (_, kind), items_of_test in tests.items():
        cases = axes([item.callspec for item in items_of_test])
        if kind == ONE_BACKEND:
            cases = [_by_backend(dict(case)) for case in cases]
        kept = set(cover(cases, STRENGTH[kind]))
        found += [item for i, item in enumerate(items_of_test) if i not in kept]
    return found


def _by_backend(case: dict[str, Hashable]) -> Case:
    return {BACKEND: case.pop(BACKEND), "case": tuple(case.values())}


def _params(item) -> Mapping[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}
