"""Recipes that kvloom recommends, chosen by measurement (docs/start/which-recipe.md).

Keys are rotated and quantized by range per channel, as by `kivi:rotate=true`. Values are rotated
and rounded to fixed levels per token, as by `turbo`. `near-lossless` and `balanced` store the first
tokens exactly. `small`, `tiny` and `micro` evict once after the prompt, and fit the values that
stay; all heads of all layers compete for one budget, as in KVzip's code and AdaKV. They keep the
first tokens and pack them with the others. No paper combines these; none needs a calibration.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...store import Packed, Store
from ..parts import Protect
from ..spec import Recipe
from .prompt_eviction import rotated

LEARNS: dict[str, Any] = {"examples": 256, "neighbors": 0.1}
"""How `small`, `tiny` and `micro` learn from a prompt how a repetition changes queries."""


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
    head_share: float = 0.2,
    block: int = 0,
) -> Recipe:
    """Four tenths of the prompt by queries that examples of it predict, fitted values, at 4 bits.

    head_share: the share of its budget that every head is certain of; with 1, heads do not compete.
    block: evict from later text, too, in blocks of so many tokens, of which the first stays, by its
    own queries; 0: later tokens stay. Models whose queries cannot be rotated (ALiBi, latents)
    repeat the prompt, and fit no values.
    """
    stored = near_lossless(group, residual, sinks)
    return _evicting(stored, fraction, recent, chunk, head_share, block=block, **LEARNS)


def tiny(
    fraction: float = 0.25,
    recent: int = 64,
    chunk: int = 2048,
    group: int = 32,
    residual: int = 32,
    sinks: int = 4,
    head_share: float = 0.2,
    block: int = 0,
) -> Recipe:
    """A quarter of the prompt, whatever the norms of values; else as `small`."""
    stored = near_lossless(group, residual, sinks)
    score = {"contribution": False, "block": block, **LEARNS}
    return _evicting(stored, fraction, recent, chunk, head_share, **score)


def micro(
    fraction: float = 0.15,
    recent: int = 64,
    chunk: int = 2048,
    group: int = 32,
    residual: int = 32,
    sinks: int = 4,
    head_share: float = 0.2,
    block: int = 0,
) -> Recipe:
    """As `tiny`, with 15% of the prompt."""
    return tiny(fraction, recent, chunk, group, residual, sinks, head_share, block)


def _evicting(
    stored: Recipe, fraction: float, recent: int, chunk: int, head_share: float, **score: Any
) -> Recipe:
    """Return a recipe that also evicts by `rotated` and fits values; score: its other options."""
    layers = "uniform" if head_share == 1 else "joint"
    chosen = rotated(
        fraction=fraction, recent=recent, chunk=chunk, sinks=stored.protect.sinks,
        head_share=head_share, layers=layers, fit=True, **score,
    )  # fmt: skip
    return replace(stored, keep=chosen.keep)


def _store(value_bits: int, group: int, residual: int) -> Store:
    """Return keys at 4 bits and values at `value_bits`."""
    return Store(
        Packed(4, "channel", group, residual=residual, rotation="head"),
        Packed(value_bits, "token", 0, rotation="group"),
    )
