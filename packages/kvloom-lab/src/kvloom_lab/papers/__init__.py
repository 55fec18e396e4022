"""The papers' claims, tested on a model: `kvloom papers`.

`claim` defines a claim, its verdict and the rules that claims share; `lab` measures. A TOML file of
each paper has its claims and figures, and the module of the same name their tests.
"""

from __future__ import annotations

from . import clusterkv, keyformer, kivi, minikv, skvq
from .claim import Claim, ClaimTable, Finding, NotTestable, Verdict, check, read_claims
from .lab import DEFAULT, QUICK, Lab

__all__ = [
    "CALIBRATED",
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
    module.__name__.rpartition(".")[2]: read_claims(module)
    for module in (kivi, skvq, keyformer, minikv, clusterkv)
}
"""By name: the paper's title, and its claims."""
CALIBRATED: dict[str, tuple[str, ...]] = {"skvq": skvq.CALIBRATED}
"""By name: recipes with all formats for which a paper's claims need a calibration."""
