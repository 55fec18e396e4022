"""Which tokens stay."""

from .expected import Expected
from .outliers import Outliers
from .policy import POSITIONS, Budget, Keep
from .reconstruction import Reconstruction
from .registered import SCORERS, built_in, checked, register_score
from .scorer import Scorer, Step
from .scorers import (
    Dilated,
    KeyNorm,
    Mass,
    Noisy,
    Observation,
    Random,
    Recent,
    ValueAware,
)
from .select import choose, protect_sinks, sinks_first

__all__ = [
    "POSITIONS",
    "SCORERS",
    "Budget",
    "Dilated",
    "Expected",
    "Keep",
    "KeyNorm",
    "Mass",
    "Noisy",
    "Observation",
    "Outliers",
    "Random",
    "Recent",
    "Reconstruction",
    "Scorer",
    "Step",
    "ValueAware",
    "built_in",
    "checked",
    "choose",
    "protect_sinks",
    "register_score",
    "sinks_first",
]
