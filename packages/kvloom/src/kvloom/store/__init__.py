"""In what format a segment stores its tokens."""

from ..kernels.quantize.encoding import Encoding, LayerEncoding
from .formats import FORMATS, Format, Packed, Store, register_format
from .kv_side import KVSide
from .layer_metadata import LayerMetadata
from .measuring import PromptPacker, calibrated_groups, random_metadata, round_trip

__all__ = [
    "FORMATS",
    "Encoding",
    "Format",
    "KVSide",
    "LayerEncoding",
    "LayerMetadata",
    "Packed",
    "PromptPacker",
    "Store",
    "calibrated_groups",
    "random_metadata",
    "register_format",
    "round_trip",
]
