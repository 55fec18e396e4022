"""Recipes that kvloom recommends, chosen by measurement (docs/start/which-recipe.md).

Keys are rotated and quantized by range per channel, as by `kivi:rotate=true`. Values are rotated
and rounded to fixed levels per token, as by `turbo`. `near-lossless` and `balanced` store the first
tokens exactly. `small` and `tiny` evict once after the prompt, by KVzip's score; all heads of all
layers compete for one budget, as in KVzip's code and AdaKV. They keep the first tokens and pack
them with the others. No paper combines these; none needs a calibration.
"""

from __future__ import annotations

from dataclasses import replace

from ...store import Packed, Store
from ..spec import Protect, Recipe
from .prompt_eviction import kvzip


def near_lossless(group: int = 32, residual: int = 128, sinks: int = 4) -> Recipe:
    """The default: rotated keys and values at 4 bits, the first tokens exact."""
    return Recipe(store=_store(4, group, residual), protect=Protect(sinks, (0, residual)))


def balanced(group: int = 64, residual: int = 64, sinks: int = 4) -> Recipe:
    """Rotated keys at 4 bits and values at 2 bits, the first tokens exact."""
    return Recipe(store=_store(2, group, residual), protect=Protect(sinks, (0, residual)))


def small(
    fraction: float = 0.4,
    recent: int = 64,
    chunk: int = 2048,
    group: int = 32,
    residual: int = 32,
    sinks: int = 4,
    heads: float = 0.2,
) -> Recipe:
    """Four tenths of the prompt by KVzip's score, stored as by `near-lossless`.

    heads: the share of its budget that every head is certain of; with 1, heads do not compete.
    """
    layers = "uniform" if heads == 1 else "joint"
    evicting = kvzip(
        fraction=fraction, sinks=sinks, recent=recent, chunk=chunk, heads=heads, layers=layers
    )
    return replace(near_lossless(group, residual, sinks), keep=evicting.keep)


def tiny(
    fraction: float = 0.25,
    recent: int = 64,
    chunk: int = 2048,
    group: int = 32,
    residual: int = 32,
    sinks: int = 4,
    heads: float = 0.2,
) -> Recipe:
    """The same with a quarter of the prompt."""
    return small(fraction, recent, chunk, group, residual, sinks, heads)


def _store(value_bits: int, group: int, residual: int) -> Store:
    """Return keys at 4 bits and values at `value_bits`."""
    return Store(
        Packed(4, "channel", group, residual=residual, rotation="head"),
        Packed(value_bits, "token", 0, rotation="group"),
    )
