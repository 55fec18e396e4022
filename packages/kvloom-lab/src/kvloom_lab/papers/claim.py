"""A claim of a paper: what it says, the paper's figures, how to test it, and the verdict.

A claim is tested by a function of a `Lab`, which returns our figures and whether the claim's stated
rule holds. What cannot be tested here states why instead.

Papers judge by task scores, which a small model does not reach. Here a recipe is better than
another if its predictions diverge less from those of the exact cache (KL divergence), by more than
chance: the 95% bootstrap interval of the paired difference over contexts excludes 0. "Keeps the
quality" means a perplexity of at most 5% above that of the exact cache, "as good" at most 1%.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from ..eval.summary import bootstrap
from ..models import REFERENCE
from ..models.smollm2 import NAME as SMOLLM2
from ..workload.errors import logged_line
from ..workload.files import read_toml
from .lab import Lab, NotTestable, Quality

REPRODUCED = "reproduced"
NOT_REPRODUCED = "not reproduced"
NOT_TESTABLE = "not testable here"
FAILED = "failed"
STYLES = {REPRODUCED: "green", NOT_REPRODUCED: "red", NOT_TESTABLE: "dim", FAILED: "yellow"}
"""How a terminal shows each status."""


@dataclass(frozen=True)
class ClaimTable:
    """A small table: row names, each with one number or text for every column; None: no figure."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[float | str | None]]


@dataclass(frozen=True)
class Finding:
    """What a test found: our figures, whether the rule holds, and the numbers that decide it.

    why_not_reproduced: why the rule does not hold, where the test itself finds that out.
    """

    ours: ClaimTable
    holds: bool
    evidence: str
    why_not_reproduced: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper.

    name: short and unique in the paper. text: the claim in one sentence. where: table, figure or
    section. rule: when we call it reproduced. test: None for a claim that is not testable here.
    why_not_reproduced: on the reference model, where the rule does not hold there. any_model: the
    test does not use the lab's model, so the cause holds for all. why_not_on_smollm2: likewise on
    SmolLM2. paper: the paper's figures; None
    where its text prints none.
    """

    name: str
    text: str
    where: str
    rule: str = ""
    test: Callable[[Lab], Finding] | None = None
    why_not_reproduced: str = ""
    any_model: bool = False
    why_not_on_smollm2: str = ""
    why_not_testable: str = ""
    paper: ClaimTable | None = None


def read_claims(module: ModuleType) -> tuple[str, tuple[Claim, ...]]:
    """Return the title and the claims in the TOML file of a paper's module.

    A claim's `test` is the name of a function of the module, without the underscore before it; its
    `columns` and `rows` are the paper's figures.
    """
    assert module.__file__ is not None
    data = read_toml(Path(module.__file__).with_suffix(".toml"))
    claims = []
    for fields in data["claim"]:
        test, columns, rows = (fields.pop(name, None) for name in ("test", "columns", "rows"))
        paper = None if columns is None else ClaimTable(columns, rows)
        function = None if test is None else getattr(module, f"_{test}")
        claims.append(Claim(test=function, paper=paper, **fields))
    return data["title"], tuple(claims)


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
    """Return the cause, which was investigated on two models alone."""
    cause = claim.why_not_reproduced
    if lab.name == SMOLLM2 and claim.why_not_on_smollm2:
        return claim.why_not_on_smollm2
    if not cause:
        return "the cause was not investigated"
    if lab.name == REFERENCE or claim.any_model:
        return cause
    return f"the cause was not investigated on this model; on the reference model: {cause}"


KEEPS = 1.05
AS_GOOD = 1.01
LEAST_FOUND = 0.5
WITHIN_CHANCE = (
    "the order is the paper's, but an interval includes 0: there are too few samples to tell it "
    "from chance, or the effect is small on this model"
)
COLUMNS = ("perplexity / full", "KL (nats)", "agrees", "bytes / full")


class Difference(NamedTuple):
    """A mean of paired differences, and its bootstrap interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Return the mean of a - b [contexts] and its 95% interval; contexts are paired.

    The interval of too few contexts includes everything.
    """
    paired = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    interval = bootstrap(paired.tolist())
    if interval.low is None or interval.high is None:
        return Difference(interval.mean, -math.inf, math.inf)
    return Difference(interval.mean, interval.low, interval.high)


def quality_figures(qualities: Mapping[str, Quality]) -> ClaimTable:
    """Return one row a recipe."""
    rows = {
        name: (q.ratio, float(q.kl.mean()), q.agreement, q.bytes_share)
        for name, q in qualities.items()
    }
    return ClaimTable(COLUMNS, rows)


def ordered(qualities: Mapping[str, Quality], *pairs: tuple[str, str]) -> Finding:
    """Return whether the first recipe of every pair is better than the second."""
    intervals = [(a, b, difference(qualities[a].kl, qualities[b].kl)) for a, b in pairs]
    evidence = "; ".join(f"KL of {a} minus {b}: {x}" for a, b, x in intervals)
    chance = all(x.mean < 0 for *_, x in intervals)
    return Finding(
        quality_figures(qualities),
        all(x.high < 0 for *_, x in intervals),
        evidence,
        WITHIN_CHANCE if chance else "",
    )


def kept(qualities: Mapping[str, Quality], limits: Mapping[str, float]) -> Finding:
    """Return whether each recipe's perplexity over that of `full` is at most its limit."""
    holds = all(qualities[name].ratio <= limit for name, limit in limits.items())
    evidence = "; ".join(
        f"{name}: {qualities[name].ratio:.3f} (limit {limit:g})" for name, limit in limits.items()
    )
    return Finding(quality_figures(qualities), holds, evidence)


def all_hold(*findings: Finding) -> Finding:
    """Return one finding of several about the same figures: it holds if all do."""
    failed = [f for f in findings if not f.holds]
    by_chance = failed and all(f.why_not_reproduced == WITHIN_CHANCE for f in failed)
    return Finding(
        findings[0].ours,
        not failed,
        "; ".join(f.evidence for f in findings),
        WITHIN_CHANCE if by_chance else "",
    )


def monotone(qualities: Mapping[str, Quality], names: Sequence[str]) -> Finding:
    """Return whether every recipe is better than the one before it."""
    return ordered(qualities, *((b, a) for a, b in pairwise(names)))


def shares(answers: Mapping[str, np.ndarray]) -> ClaimTable:
    """Return the share of correct answers of each recipe."""
    rows = {name: (float(x.mean()), float(len(x))) for name, x in answers.items()}
    return ClaimTable(("found", "contexts"), rows)


def require_retrieval(answers: Mapping[str, np.ndarray]) -> None:
    """Raise `NotTestable` if the exact cache answers less than half of the questions."""
    full = float(answers["full"].mean())
    if full < LEAST_FOUND:
        raise NotTestable(
            f"with its exact cache this model answers {full:.0%} of the questions; a model that "
            f"answers at least {LEAST_FOUND:.0%} is needed"
        )
