"""In what format a segment stores its tokens."""

from .codec import LayerMetadata
from .formats import Packed, Store, Transform
from .kv_side import KVSide

__all__ = ["KVSide", "LayerMetadata", "Packed", "Store", "Transform"]
