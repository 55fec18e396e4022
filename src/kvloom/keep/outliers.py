"""Which tokens of a prompt are spared from packing beside the first and the newest ones.

SKVQ (arXiv:2405.06219, section 3.3) calls it a filter rule. A rule is a score, as those that choose
what stays, or any function of a `Step`: plus infinity marks a token, minus infinity leaves it out,
and among the rest the highest are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import RecipeError
from .policy import GROUPS
from .scorers import SCORERS, Mass, Scorer, Step

Rule = Callable[[Step], Tensor]
"""Takes a `Step` and returns fp32 [B, Hk, N], one number a token and key/value head."""


@dataclass(frozen=True)
class Spare:
    """The `tokens` best tokens of each head by a rule stay exact; heavy hitters by default.

    group: how the scores of the query heads of a group become one.
    """

    tokens: int
    scorer: Rule = field(default_factory=Mass)
    group: str = "sum"

    def __post_init__(self) -> None:
        if type(self.tokens) is not int or self.tokens < 1:
            raise RecipeError(f"tokens={self.tokens!r} to spare must be a whole number, 1 or more")
        if not callable(self.scorer):
            raise RecipeError(
                f"scorer={self.scorer!r} is no score: give one of {', '.join(SCORERS)}, or a "
                "function of a Step"
            )
        if self.group not in GROUPS:
            raise RecipeError(f"group={self.group!r} is not one of {', '.join(GROUPS)}")

    @property
    def kind(self) -> str:
        """The name of the rule; raises `RecipeError` for a function, which a file cannot hold."""
        kind = self.scorer.kind if isinstance(self.scorer, Scorer) else ""
        if kind not in SCORERS:
            raise RecipeError(
                "a rule that is a function cannot be written down; name one of "
                f"{', '.join(SCORERS)}"
            )
        return kind
