"""The registry of scores, and the check of what a score returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import RecipeError
from ..registry import Registry
from .expected import Expected
from .reconstruction import Reconstruction
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

S = TypeVar("S", bound="Scorer")

_BUILT_IN = (
    Recent, Dilated, Mass, Observation, Noisy, Random,
    Reconstruction, Expected, ValueAware, KeyNorm,
)  # fmt: skip

SCORERS: Registry[type[Scorer]] = Registry(
    "score",
    {cls.kind: cls for cls in _BUILT_IN},
    Scorer,
    ("__call__",),
)

Rule = Callable[[Step], Tensor]
"""Takes a `Step` and returns fp32 [B, Hk, N], one number for each token and key/value head."""


def register_score(cls: type[S]) -> type[S]:
    """Make a score available to recipes by its `kind`; usable as a decorator.

    Args:
        cls: A frozen dataclass derived from `Scorer`.

    Returns:
        The class.

    Raises:
        RecipeError: It is another class, or its name is taken.
    """
    SCORERS.register(cls)
    return cls


def checked(scorer: Rule, step: Step) -> Tensor:
    """Return the scores of a step, fp32 [B, Hk, N].

    Raises `RecipeError` with the score's name for any other shape, dtype or device, and for NaN
    from a score that is not built in.
    """
    scores = scorer(step)
    expected = step.k.shape[:3]
    if not isinstance(scores, Tensor):
        raise _refused(scorer, f"returned {type(scores).__name__}, not a tensor")
    if scores.shape != expected or scores.dtype != torch.float32:
        raise _refused(
            scorer,
            f"returned {_called(scores.dtype)} {list(scores.shape)}; return float32 "
            f"{list(expected)}: rows, key/value heads, tokens",
        )
    if scores.device != step.k.device:
        raise _refused(scorer, f"returned scores on {scores.device}; return {step.k.device}")
    if not built_in(scorer) and bool(scores.isnan().any()):
        raise _refused(scorer, "returned NaN; return numbers, or infinity")
    return scores


def built_in(scorer: Rule) -> bool:
    """Return whether a score is kvloom's own."""
    kind = getattr(scorer, "kind", "")
    return SCORERS.is_builtin(kind) and type(scorer) is SCORERS[kind]


def _refused(scorer: Rule, why: str) -> RecipeError:
    name = getattr(scorer, "kind", "") or getattr(scorer, "__name__", type(scorer).__name__)
    return RecipeError(f"score {name!r} {why}")


def _called(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
