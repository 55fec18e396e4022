"""Which tokens stay."""

from .base import POSITIONS, Budget, Keep
from .scorers import SCORERS, Dilated, Mass, Noisy, Observation, Random, Recent, Scorer, Step
from .select import choose, protect_sinks
from .spare import Spare

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
