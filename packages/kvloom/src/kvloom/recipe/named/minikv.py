"""MiniKV (arXiv:2411.18077): evict once after the prompt, then 2 bits.

Heavy hitters by accumulated attention over the whole prompt, a recent window beside them, each
share rounded down to whole tokens, frozen for the generation (section 3.1); pyramid budgets for the
heavy part (section 3.2; as in the official code the lower layers get more, where the paper's
formula has the ends swapped). What stays is packed at group 16; generated tokens gather in an exact
buffer of 128.

Departures: scores are normalised row by row (the paper's kernel skips it); one decision per
key/value head (the official code repeats the heads); the buffer is packed after the step that
fills it; minikv-snap pools by mean (the official scripts by maximum).
"""

from __future__ import annotations

from ...keep import Budget, Keep, Mass, Observation, Scorer
from ...store import Packed, Store
from ..spec import Recipe


def minikv(
    fraction: float = 0.5,
    recent: int | float = 0.5,
    bits: int | float = 2,
    group: int = 16,
    residual: int = 128,
    layers: str = "uniform",
) -> Recipe:
    """MiniKV (arXiv:2411.18077): heavy hitters and recent tokens of the prompt, in 2 bits."""
    budget = Budget(fraction=fraction, recent=recent, layers=layers, apart=True)
    return _minikv(budget, Mass(), bits, group, residual)


def minikv_pyramid(
    fraction: float = 0.5,
    recent: int | float = 0.5,
    bits: int | float = 2,
    group: int = 16,
    residual: int = 128,
) -> Recipe:
    """MiniKV with more heavy hitters in lower layers."""
    return minikv(fraction, recent, bits, group, residual, layers="pyramid")


def minikv_snap(
    fraction: float = 0.5,
    window: int = 32,
    kernel: int = 7,
    bits: int | float = 2,
    group: int = 16,
    residual: int = 128,
    layers: str = "uniform",
) -> Recipe:
    """MiniKV with SnapKV's choice of tokens."""
    budget = Budget(fraction=fraction, recent=window, layers=layers)
    return _minikv(budget, Observation(window=window, kernel=kernel), bits, group, residual)


def minikv_snap_pyramid(
    fraction: float = 0.5,
    window: int = 32,
    kernel: int = 7,
    bits: int | float = 2,
    group: int = 16,
    residual: int = 128,
) -> Recipe:
    """MiniKV with SnapKV's choice, and more tokens in lower layers."""
    return minikv_snap(fraction, window, kernel, bits, group, residual, layers="pyramid")


def _minikv(budget: Budget, scorer: Scorer, bits: float, group: int, residual: int) -> Recipe:
    def fmt(axis: str) -> Packed:
        return Packed(bits, axis, group, residual=residual, unit=group)

    return Recipe(
        keep=Keep(budget, scorer, when="prompt"),
        store=Store(fmt("channel"), fmt("token")),
    )
