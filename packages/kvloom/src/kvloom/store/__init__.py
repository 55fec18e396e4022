"""In what format a segment stores its tokens."""

from ..kernels.quantize.encoding import Encoding, LayerEncoding
from .formats import FORMATS, Format, Packed, Store, register_format
from .kv_side import KVSide
from .layer_metadata import LayerMetadata

__all__ = [
    "FORMATS",
    "Encoding",
    "Format",
    "KVSide",
    "LayerEncoding",
    "LayerMetadata",
    "Packed",
    "Store",
    "register_format",
]
