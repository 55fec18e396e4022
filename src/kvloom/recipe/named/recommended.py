"""Recipes that kvloom recommends, chosen by measurement (docs/start/which-recipe.md).

Keys are rotated and quantized by range per channel, as by `kivi:rotate=true`. Values are rotated
and rounded to fixed levels per token, as by `turbo`. The first tokens stay exact. No paper combines
these; neither needs a calibration.
"""

from __future__ import annotations

from ...store import Packed, Store, Transform
from ..spec import Protect, Recipe


def near_lossless(group: int = 32, residual: int = 128, sinks: int = 4) -> Recipe:
    """The default: rotated keys and values at 4 bit, the first tokens exact."""
    return _rotated(4, group, residual, sinks)


def balanced(group: int = 64, residual: int = 128, sinks: int = 4) -> Recipe:
    """Rotated keys and values at 3 bit, the first tokens exact."""
    return _rotated(3, group, residual, sinks)


def _rotated(bits: int, group: int, residual: int, sinks: int) -> Recipe:
    by_range, by_levels = Transform(hadamard=True), Transform(rotate=True)
    keys = Packed(bits, "channel", group, residual=residual, transform=by_range)
    values = Packed(bits, "token", 0, transform=by_levels)
    return Recipe(store=Store(keys, values), protect=Protect(sinks, (0, residual)))
