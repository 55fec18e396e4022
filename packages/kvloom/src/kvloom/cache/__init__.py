"""The cache of one layer, composed of the parts that a recipe needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .build import build_layers
    from .inspection import LayerContents, fill, holds_packed, layer_contents, read_nbytes
    from .layer import LayerCache
    from .rehearsal import rehearse

__all__ = [
    "LayerCache",
    "LayerContents",
    "build_layers",
    "fill",
    "holds_packed",
    "layer_contents",
    "read_nbytes",
    "rehearse",
]
__getattr__ = lazy_names(
    __name__,
    {
        "build": ("build_layers",),
        "inspection": ("LayerContents", "fill", "holds_packed", "layer_contents", "read_nbytes"),
        "layer": ("LayerCache",),
        "rehearsal": ("rehearse",),
    },
)
