"""Which tokens stay."""

from .outliers import Outliers
from .policy import POSITIONS, Budget, Keep
from .reconstruction import Reconstruction
from .scorer import Scorer, Step
from .scorers import (
    SCORERS,
    Dilated,
    Mass,
    Noisy,
    Observation,
    Random,
    Recent,
    checked,
    register_score,
)
from .select import choose, protect_sinks

__all__ = [
    "POSITIONS",
    "SCORERS",
    "Budget",
    "Dilated",
    "Keep",
    "Mass",
    "Noisy",
    "Observation",
    "Outliers",
    "Random",
    "Recent",
    "Reconstruction",
    "Scorer",
    "Step",
    "checked",
    "choose",
    "protect_sinks",
    "register_score",
]
