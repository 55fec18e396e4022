"""In what format a segment stores its tokens."""

from ..kernels.quantize.encoding import Encoding, LayerEncoding
from .calibration import Calibration
from .formats import FORMATS, Format, FormatView, Packed, Store, register_format
from .kv_side import KVSide
from .layer_metadata import LayerMetadata
from .measuring import PromptPacker, calibrated_groups, random_metadata, round_trip
from .packed_view import PackedView

__all__ = [
    "FORMATS",
    "Calibration",
    "Encoding",
    "Format",
    "FormatView",
    "KVSide",
    "LayerEncoding",
    "LayerMetadata",
    "Packed",
    "PackedView",
    "PromptPacker",
    "Store",
    "calibrated_groups",
    "random_metadata",
    "register_format",
    "round_trip",
]
