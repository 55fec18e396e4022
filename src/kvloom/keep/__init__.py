"""Which tokens stay."""

from .base import Budget, Keep
from .scorers import SCORERS, Dilated, Mass, Noisy, Observation, Random, Recent, Scorer, Step
from .select import choose, protect_sinks

__all__ = [
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
    "Step",
    "choose",
    "protect_sinks",
]
