"""In what format a segment holds its tokens."""

from .formats import Packed, Store, Transform
from .lane import Lane

__all__ = ["Lane", "Packed", "Store", "Transform"]
