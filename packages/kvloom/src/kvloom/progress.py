"""The functions that long work reports its progress to."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Progress", "TotalProgress"]

Progress = Callable[[str, int], None]
"""Called with the current work, and the units of work finished since the last call."""
TotalProgress = Callable[[str, int, int], None]
"""Called with the current work, how many units of all work are finished, and how many there are."""
