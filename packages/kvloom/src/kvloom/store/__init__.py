"""In what format a segment stores its tokens."""

from .codec import LayerMetadata
from .formats import FORMATS, Format, Packed, Store, register_format
from .kv_side import KVSide
from .transform import Transform

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
