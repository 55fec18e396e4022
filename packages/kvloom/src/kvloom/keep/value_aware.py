"""VATP's score: another score times the length of the value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from ..errors import RecipeError
from .scorer import Scorer, Step
from .scorers import Mass


@dataclass(frozen=True)
class ValueAware(Scorer):
    """The score of `base` times the L1 norm of the value (VATP, arXiv:2406.12335, equation 4).

    Attributes:
        base: A score that sums up attention, such as `Mass` or `Observation`.
    """

    base: Scorer = field(default_factory=Mass)
    kind: ClassVar[str] = "value-aware"
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.base, Scorer) or not self.base.weighs:
            raise RecipeError(
                f"base={self.base!r} of a value-aware score must be a score of attention, such as "
                "mass or observation"
            )

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return self.base(step) * step.v.float().norm(p=1, dim=-1)

    def join(self, former: Tensor, new: Tensor) -> Tensor:
        """As `base` joins: a value's norm does not change, so it is a factor of both."""
        return self.base.join(former, new)
