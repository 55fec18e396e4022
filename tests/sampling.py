"""Which cases the default run takes of a test that has more than it needs to find most defects.

The others have the mark `slow`: they run with `-m slow`, or with all others by `-m ""`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

import pytest


def slow_except(values: Mapping[str, object] | Iterable[str], *default: str) -> list:
    """Return values for `pytest.mark.parametrize`, slow except those named in `default`.

    values: {name: value}, or the names alone.
    """
    named = values if isinstance(values, Mapping) else {name: name for name in values}
    assert set(default) <= set(named)
    return [
        pytest.param(value, id=name, marks=() if name in default else pytest.mark.slow)
        for name, value in named.items()
    ]


def left_out(cases: Sequence[pytest.Item], sample: bool = False) -> list[pytest.Item]:
    """Return the cases of one test that the default run leaves out; `conftest.py` marks them.

    Of a test with the mark `sample`, or of any with `sample`, every value of every parameter stays
    in some case. Of one that runs by two backends, each case stays by one of them, and both
    backends stay in some case.
    """
    params = [case.callspec.params for case in cases]
    texts = [{(name, repr(x)) for name, x in one.items()} for one in params]  # some have no hash
    if sample or cases[0].get_closest_marker("sample"):
        sets = texts
    elif "kernels" in params[0]:
        backends = [{one for one in text if one[0] == "kernels"} for text in texts]
        sets = [one | {frozenset(text - one)} for one, text in zip(backends, texts, strict=True)]
    else:
        return []
    kept = set_cover(sets)
    return [case for i, case in enumerate(cases) if i not in kept]


def set_cover(sets: Sequence[set]) -> set[int]:
    """Return the numbers of sets that have all elements between them, by the greedy algorithm.

    It takes the set with the most elements that are missing so far, again and again. Of several
    such sets a fixed shuffled order decides, so that those that are taken lie all over the grid.
    """
    order = random.Random(0).sample(range(len(sets)), len(sets))
    missing, chosen = set().union(*sets), set()
    while missing:
        best = max(order, key=lambda i: len(sets[i] & missing))
        chosen.add(best)
        missing -= sets[best]
    return chosen
