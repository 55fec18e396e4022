"""A score: attention mass times the norm of the value."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import kvloom
from kvloom.keep import Scorer, Step


@kvloom.register_score
@dataclass(frozen=True)
class ValueNorm(Scorer):
    """A token that gets much attention changes little where its value is short.

    power: of the norm; 0 is the attention mass alone.
    """

    power: float = 1.0
    kind: ClassVar[str] = "value-norm"
    sums_attention: ClassVar[bool] = True  # it calls step.mass

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return step.mass() * step.v.float().norm(dim=-1) ** self.power

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """Add a step's scores to those before it."""
        return former + new
