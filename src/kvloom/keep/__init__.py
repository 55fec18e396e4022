"""Which tokens stay."""

from .base import Budget, Keep

__all__ = ["Budget", "Keep"]
