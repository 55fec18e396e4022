"""Which tokens stay."""

from .outliers import Spare
from .policy import POSITIONS, Budget, Keep
from .scorers import SCORERS, Dilated, Mass, Noisy, Observation, Random, Recent, Scorer, Step
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
    "Random",
    "Recent",
    "Scorer",
    "Spare",
    "Step",
    "choose",
    "protect_sinks",
]
