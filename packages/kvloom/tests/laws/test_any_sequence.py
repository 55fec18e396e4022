"""Any sequence of steps, drafts, crops, moves of rows, copies and interruptions, under any recipe.

`make soak` runs a million such cases; those that failed are below.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from backends import by_reference
from kvloom.keep import Budget, Keep, Mass, Outliers
from kvloom.recipe import Protect, Recipe
from kvloom.store import Packed, Store
from sequences import Case, cases, run

pytestmark = by_reference

PACKED_VALUES = Store(values=Packed(bits=2, axis="token", group=16))
FOUND = {
    "sinks of a padded row that are outliers of some heads": Case(
        Recipe(store=PACKED_VALUES, protect=Protect(5, 3, Outliers(35))),
        1, (4, 4), 16, "fp32", (0, 9), (("step", 48),), seed=28,
    ),
    "a variance of one token": Case(
        Recipe(Keep(Budget(8, recent=0, layers="variance"), Mass())),
        2, (2, 1), 16, "fp32", (0,), (("step", 1),),
    ),
}  # fmt: skip


@settings(max_examples=100)
@given(cases())
def test_any_sequence(case):
    run(case)


@pytest.mark.parametrize("case", FOUND.values(), ids=FOUND)
def test_what_the_campaign_has_found(case):
    run(case)
