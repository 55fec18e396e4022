"""Recency: the last tokens, with the first ones, or with gaps.

The prompt's own attention is exact; tokens are evicted after it and after every step.
"""

from __future__ import annotations

from ...keep import Budget, Dilated, Keep
from ..spec import Protect, Recipe


def window(tokens: int = 1024, limit: int = 0) -> Recipe:
    """The newest tokens and nothing else.

    limit: evict only when a layer has more than this many tokens (0: at every step).
    """
    when = "limit" if limit else "step"
    return Recipe(keep=Keep(Budget(tokens=tokens), when=when, limit=limit or None))


def dilated(tokens: int = 1024, stride: int = 2) -> Recipe:
    """A dilated window (arXiv:2403.09054, figure 2): every second of twice as many tokens."""
    return Recipe(keep=Keep(Budget(tokens=tokens, recent=1), Dilated(stride)))


def streaming(tokens: int = 1024, sinks: int = 4, positions: str = "original") -> Recipe:
    """StreamingLLM (arXiv:2309.17453): attention sinks and the newest tokens.

    The paper's positions are `streaming:positions=renumbered`.
    """
    keep = Keep(Budget(tokens=tokens), positions=positions)
    return Recipe(keep=keep, protect=Protect(sinks=sinks))
