"""In what format a segment stores its tokens."""

from ..encoding import Encoding, LayerEncoding
from ..kernels.quantize.packed_view import PackedView
from .buffer import grown_capacity
from .calibration import Calibration
from .formats import FORMATS, Format, FormatView, Packed, Store, register_format
from .kv_side import KVSide
from .layer_facts import LayerFacts
from .measuring import PromptPacker, random_layer_facts, round_trip

__all__ = [
    "FORMATS",
    "Calibration",
    "Encoding",
    "Format",
    "FormatView",
    "KVSide",
    "LayerEncoding",
    "LayerFacts",
    "Packed",
    "PackedView",
    "PromptPacker",
    "Store",
    "grown_capacity",
    "random_layer_facts",
    "register_format",
    "round_trip",
]
