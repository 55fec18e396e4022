"""Eviction by the lengths of keys and values: key norm, and VATP.

Departures: `knorm` keeps sinks and the newest tokens, and treats all layers alike (the paper leaves
its first layers complete); `vatp` decides per key/value head, by the summed scores of its query
heads.

Options:

tokens, fraction: the budget, in tokens or as a fraction of the prompt. knorm uses tokens unless
fraction is given, vatp the fraction unless tokens is given.
sinks, recent: the first and the newest tokens that stay, within the budget.
store: the recipe whose format the tokens have ("kivi-4").
"""

from __future__ import annotations

from ...keep import Budget, Keep, KeyNorm, ValueAware
from ..spec import Protect, Recipe
from .stored import stored_as


def knorm(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    store: str = "full",
) -> Recipe:
    """Key norm (arXiv:2406.11430): once after the prompt, the tokens with the shortest keys."""
    budget = Budget(None if fraction else tokens, fraction or None, recent)
    keep = Keep(budget, KeyNorm(), when="prompt")
    return stored_as(store, Recipe(keep=keep, protect=Protect(sinks)))


def vatp(
    fraction: float = 0.5, recent: int | float = 0.5, tokens: int = 0, sinks: int = 20
) -> Recipe:
    """VATP (arXiv:2406.12335): H2O's accumulated attention times the L1 norm of the value."""
    budget = Budget(tokens or None, None if tokens else fraction, recent)
    return Recipe(keep=Keep(budget, ValueAware()), protect=Protect(sinks))
