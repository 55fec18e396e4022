"""Outliers: tokens of a prompt that stay exact, beside the first and the newest ones.

SKVQ (arXiv:2405.06219, section 3.3) calls this a filter rule. A rule is a score, or any function of
a `Step` (with the attribute `reads_ids` where it needs token ids): the tokens with the highest
scores stay exact. Plus infinity always includes a token as far as `tokens` allows, minus infinity
excludes it as far as there are others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import RecipeError
from .policy import HEAD_GROUPS
from .registered import SCORERS, Rule
from .scorer import Scorer
from .scorers import Mass


@dataclass(frozen=True)
class Outliers:
    """The best tokens of each head by a rule stay exact; heavy hitters by default.

    Attributes:
        tokens: How many, of each key/value head.
        scorer: The rule: a score, or a function of a `Step`.
        group: How the scores of the query heads of a group become one: "sum", "mean" or "max".
    """

    tokens: int
    scorer: Scorer | Rule = field(default_factory=Mass)
    group: str = "sum"

    def __post_init__(self) -> None:
        if type(self.tokens) is not int or self.tokens < 1:
            raise RecipeError(
                f"tokens={self.tokens!r} of outliers must be a whole number, 1 or more"
            )
        if not callable(self.scorer):
            raise RecipeError(
                f"scorer={self.scorer!r} is not a score: give one of {', '.join(SCORERS)}, or a "
                "function of a Step"
            )
        if isinstance(self.scorer, Scorer) and self.scorer.repeats:
            raise RecipeError(
                f"score {self.scorer.kind!r} repeats the prompt, which outliers do not wait for; "
                "use another score for outliers"
            )
        if self.group not in HEAD_GROUPS:
            raise RecipeError(f"group={self.group!r} is not one of {', '.join(HEAD_GROUPS)}")

    @property
    def reads_ids(self) -> bool:
        """Whether the rule reads `Step.ids`."""
        return bool(getattr(self.scorer, "reads_ids", False))
