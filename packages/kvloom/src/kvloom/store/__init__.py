"""In what format a segment stores its tokens."""

from .codec import LayerMetadata
from .formats import FORMATS, Format, Packed, Store, register_format
from .kv_side import KVSide
from .measuring import PromptPacker, calibrated_groups, random_metadata, round_trip
from .transform import Transform

__all__ = [
    "FORMATS",
    "Format",
    "KVSide",
    "LayerMetadata",
    "Packed",
    "PromptPacker",
    "Store",
    "Transform",
    "calibrated_groups",
    "random_metadata",
    "register_format",
    "round_trip",
]
