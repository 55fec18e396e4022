"""Recency: the last tokens, with or without the first ones.

The prompt's own attention is exact; tokens are dropped after it and after every step. Tokens keep
their own positions (StreamingLLM's paper renumbers them; most later work does not).
"""

from __future__ import annotations

from ..keep import Budget, Keep
from ..recipe import Protect, Recipe


def window(tokens: int = 1024) -> Recipe:
    """The newest tokens and nothing else."""
    return Recipe(keep=Keep(Budget(tokens=tokens)), name="window")


def streaming(tokens: int = 1024, sinks: int = 4) -> Recipe:
    """StreamingLLM (arXiv:2309.17453): attention sinks and the newest tokens."""
    return Recipe(keep=Keep(Budget(tokens=tokens)), protect=Protect(sinks=sinks), name="streaming")
