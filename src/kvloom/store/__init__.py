"""In what format a segment holds its tokens."""

from .codec import NOTHING, Known
from .formats import FORMATS, Format, Packed, Store, Transform, register_format
from .lane import Lane

__all__ = [
    "FORMATS",
    "NOTHING",
    "Format",
    "Known",
    "Lane",
    "Packed",
    "Store",
    "Transform",
    "register_format",
]
