"""In what format a segment holds its tokens."""

from .formats import Packed, Store
from .lane import Lane

__all__ = ["Lane", "Packed", "Store"]
