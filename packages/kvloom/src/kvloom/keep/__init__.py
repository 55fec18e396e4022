"""Which tokens stay."""

from .expected import Expected
from .fit import Fit
from .policy import POSITIONS, Budget, Keep, Outliers
from .reconstruction import Reconstruction
from .rotated import Rotated
from .scorer import Scorer, Step
from .scorers import (
    SCORERS,
    Dilated,
    KeyNorm,
    Mass,
    Noisy,
    Observation,
    Random,
    Recent,
    ValueAware,
    built_in,
    checked,
    register_score,
)
from .select import PROTECTED, choose, protect_sinks, sinks_first
from .triattention import TriAttention

__all__ = [
    "POSITIONS",
    "PROTECTED",
    "SCORERS",
    "Budget",
    "Dilated",
    "Expected",
    "Fit",
    "Keep",
    "KeyNorm",
    "Mass",
    "Noisy",
    "Observation",
    "Outliers",
    "Random",
    "Recent",
    "Reconstruction",
    "Rotated",
    "Scorer",
    "Step",
    "TriAttention",
    "ValueAware",
    "built_in",
    "checked",
    "choose",
    "protect_sinks",
    "register_score",
    "sinks_first",
]
