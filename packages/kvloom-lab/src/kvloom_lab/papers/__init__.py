"""The papers' claims, tested on a model: `kvloom papers`.

`claim` defines a claim and its verdict, `lab` measures, `judge` has the rules that claims share;
one file a paper lists its claims.
"""

from __future__ import annotations

from . import clusterkv, keyformer, kivi, minikv, skvq
from .claim import Claim, ClaimTable, Finding, NotTestable, Verdict, check
from .lab import DEFAULT, QUICK, Lab

__all__ = [
    "DEFAULT",
    "PAPERS",
    "QUICK",
    "Claim",
    "ClaimTable",
    "Finding",
    "Lab",
    "NotTestable",
    "Verdict",
    "check",
]

PAPERS: dict[str, tuple[str, tuple[Claim, ...]]] = {
    module.__name__.rpartition(".")[2]: ((module.__doc__ or "").rstrip(".\n"), module.CLAIMS)
    for module in (kivi, skvq, keyformer, minikv, clusterkv)
}
"""By name: the paper's title, and its claims."""
