"""Any sequence of operations on a cache under any recipe, in float64: tests/sequences.py.

A case that fails is shrunk.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from kvloom.keep import policy
from sequences import Case, case_of, run, simpler

from .tally import Tally

CASES = 1_000_000


def run_all(tally: Tally) -> None:
    """Run cases by number."""
    policy.FLOOR_TOKENS = 2  # short prompts evict
    operations = 0
    for number in tally.numbers(CASES):
        case = case_of(number)
        operations += len(case.operations)
        try:
            tally.state.write_text(str(number))
            tally.cases += 1
            run(case)
        except Exception as error:
            tally.fail(f"{number}: {type(error).__name__}: {error}: {shrunk(case, error)}")
    tally.figures["operations"] = operations


def shrunk(case: Case, error: Exception) -> Case:
    """Return the simplest case that fails as this one does."""

    def fails(case: Case) -> bool:
        try:
            run(case)
        except Exception as other:
            return _where(other) == _where(error)
        return False

    return _simplest(case, fails)


def _where(error: Exception) -> tuple[type, str, int]:
    """Return the kind of an error, and the last line of Python that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error), frame.filename, frame.lineno or 0


def _simplest(case: Case, fails: Callable[[Case], bool]) -> Case:
    while (found := next(filter(fails, simpler(case)), None)) is not None:
        case = found
    return case
