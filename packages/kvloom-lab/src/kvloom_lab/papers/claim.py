"""A claim of a paper: what it says, the paper's figures, how to test it, and the verdict.

A claim is tested by a function of a `Lab`, which returns our figures and whether the claim's stated
rule holds. What cannot be tested here states why instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..report.errors import logged_line

if TYPE_CHECKING:
    from .lab import Lab


REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
NOT_TESTABLE = "not testable here"
FAILED = "failed"


@dataclass(frozen=True)
class ClaimTable:
    """A small table: row names, each with one number or text for every column; None: no figure."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[float | str | None]]

    def only(self, *names: str) -> ClaimTable:
        """Return it with these rows alone."""
        return ClaimTable(self.columns, {name: self.rows[name] for name in names})


@dataclass(frozen=True)
class Finding:
    """What a test found: our figures, whether the rule holds, and the numbers that decide it.

    why_not_reproduced: why the rule does not hold, where the test itself finds that out.
    """

    ours: ClaimTable
    holds: bool
    evidence: str
    why_not_reproduced: str = ""


class NotTestable(Exception):
    """Raised by a test whose result on this model would say nothing about the claim."""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    name: short and unique in the paper. text: the claim in one sentence. where: table, figure or
    section. rule: when we call it reproduced. test: None for a claim that is not testable here.
    why_not_reproduced: on the reference model, where the rule does not hold there. paper: the
    paper's figures; None where its text prints none.
    """

    name: str
    text: str
    where: str
    rule: str = ""
    test: Callable[[Lab], Finding] | None = None
    why_not_reproduced: str = ""
    why_not_testable: str = ""
    paper: ClaimTable | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of a claim.

    status: REPRODUCED, NOT_REPRODUCED, NOT_TESTABLE or FAILED. ours: our figures; None if there are
    none. evidence: the numbers that decide. explanation: why it is not reproduced or not testable,
    or the error.
    """

    claim: Claim
    status: str
    ours: ClaimTable | None = None
    evidence: str = ""
    explanation: str = ""


def check(claim: Claim, lab: Lab) -> Verdict:
    """Test a claim. An error of the test becomes the status FAILED; a defect is also logged."""
    if claim.test is None:
        return Verdict(claim, NOT_TESTABLE, explanation=claim.why_not_testable)
    try:
        finding = claim.test(lab)
    except NotTestable as error:
        return Verdict(claim, NOT_TESTABLE, explanation=str(error))
    except Exception as error:
        return Verdict(claim, FAILED, explanation=logged_line(error, f"claim {claim.name!r}"))
    if finding.holds:
        return Verdict(claim, REPRODUCED, finding.ours, finding.evidence)
    return Verdict(
        claim,
        NOT_REPRODUCED,
        finding.ours,
        finding.evidence,
        finding.why_not_reproduced or _why_not_reproduced(claim, lab),
    )


def _why_not_reproduced(claim: Claim, lab: Lab) -> str:
    """Return the cause, which was investigated on the reference model alone."""
    cause = claim.why_not_reproduced
    if not cause:
        return "the cause was not investigated"
    if lab.is_reference:
        return cause
    return f"the cause was not investigated on this model; on the reference model: {cause}"
