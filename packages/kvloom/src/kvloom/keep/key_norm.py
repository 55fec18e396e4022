"""The length of the key as a score: short keys stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .scorer import Scorer, Step


@dataclass(frozen=True)
class KeyNorm(Scorer):
    """The negative length of the key (arXiv:2406.11430): short keys receive more attention."""

    kind: ClassVar[str] = "key-norm"

    def __call__(self, step: Step) -> Tensor:
        """Return fp32 [B, Hk, N]."""
        return -step.k.float().norm(dim=-1)
