"""A claim of a paper: what it says, the paper's figures, how to test it, and the verdict.

A claim is tested by a function of a `Lab`, which returns our figures and whether the claim's stated
rule holds. What cannot be tested here states why instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...report.errors import logged_line

if TYPE_CHECKING:
    from .lab import Lab


REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
NOT_TESTABLE = "not testable here"
FAILED = "failed"


@dataclass(frozen=True)
class Figures:
    """A small table: row names, each with one number or text for every column; None: no figure."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[float | str | None]]

    def only(self, *names: str) -> Figures:
        """Return it with these rows alone."""
        return Figures(self.columns, {name: self.rows[name] for name in names})


@dataclass(frozen=True)
class Finding:
    """What a test found: our figures, whether the rule holds, and the numbers that decide it.

    cause: why the rule does not hold, where the test itself finds that out.
    """

    ours: Figures
    holds: bool
    evidence: str
    cause: str = ""


class NotTestable(Exception):
    """Raised by a test whose result on this model would say nothing about the claim."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    name: short and unique in the paper. text: the claim in one sentence. where: table, figure or
    section. rule: when we call it reproduced. test: None if `reason` says why it is not testable
    here. cause: why the rule does not hold on the reference model, where it does not. paper: the
    paper's figures; None where its text prints none.
    """

    name: str
    text: str
    where: str
    rule: str = ""
    test: Callable[[Lab], Finding] | None = None
    cause: str = ""
    reason: str = ""
    paper: Figures | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of a claim.

    status: REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE or FAILED. ours: our figures; None if there are
    none. evidence: the numbers that decide. reason: the cause, why it is not testable,
    or the error.
    """

    claim: Claim
    status: str
    ours: Figures | None = None
    evidence: str = ""
    reason: str = ""


def check(claim: Claim, lab: Lab) -> Verdict:
    """Test a claim. An error of the test becomes the status FAILED; a defect is also logged."""
    if claim.test is None:
        return Verdict(claim, NOT_TESTABLE, reason=claim.reason)
    try:
        found = claim.test(lab)
    except NotTestable as error:
        return Verdict(claim, NOT_TESTABLE, reason=str(error))
    except Exception as error:
        return Verdict(claim, FAILED, reason=logged_line(error, f"claim {claim.name!r}"))
    if found.holds:
        return Verdict(claim, REPRODUCED, found.ours, found.evidence)
    return Verdict(
        claim, NOT_REPRODUCED, found.ours, found.evidence, found.cause or _cause(claim, lab)
    )


def _cause(claim: Claim, lab: Lab) -> str:
    """Return the cause, which was investigated on the reference model alone."""
    if not claim.cause:
        return "the cause was not investigated"
    if lab.is_reference:
        return claim.cause
    return f"the cause was not investigated on this model; on the reference model: {claim.cause}"
