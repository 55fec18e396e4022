"""In what format a segment stores its tokens."""

from .codec import LayerMetadata
from .formats import FORMATS, Format, Packed, Store, Transform, register_format
from .kv_side import KVSide

__all__ = [
    "FORMATS",
    "Format",
    "KVSide",
    "LayerMetadata",
    "Packed",
    "Store",
    "Transform",
    "register_format",
]
