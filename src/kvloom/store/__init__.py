"""In what format a segment holds its tokens."""

from .codec import NOTHING, Known
from .formats import Packed, Store, Transform
from .lane import Lane

__all__ = ["NOTHING", "Known", "Lane", "Packed", "Store", "Transform"]
