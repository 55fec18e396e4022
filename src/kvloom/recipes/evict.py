"""Eviction by attention: H2O, SnapKV, PyramidKV, Keyformer.

Every decision is made per key/value head, from the summed scores of its query heads; dropped
tokens free their memory; tokens keep their own positions. A budget is `tokens`, or, where that is
0, a `fraction` of the prompt.
"""

from __future__ import annotations

from ..keep import Budget, Keep, Mass, Noisy, Observation, Random
from ..recipe import Protect, Recipe


def _budget(tokens: int, fraction: float, recent: int | float, layers: str = "uniform") -> Budget:
    """A budget in tokens, or in a fraction of the prompt where tokens is 0."""
    if tokens:
        return Budget(tokens=tokens, recent=recent, layers=layers)
    return Budget(fraction=fraction, recent=recent, layers=layers)


def h2o(fraction: float = 0.5, recent: float = 0.5, tokens: int = 0) -> Recipe:
    """H2O (arXiv:2306.14048): heavy hitters by accumulated attention, half of it recent."""
    return Recipe(keep=Keep(_budget(tokens, fraction, recent), Mass()), name="h2o")


def keyformer(
    fraction: float = 0.5,
    recent: float = 0.3,
    noise: str = "gumbel",
    tau_end: float = 2.0,
    steps: int = 128,
    tokens: int = 0,
) -> Recipe:
    """Keyformer (arXiv:2403.09054): key tokens by a Gumbel-noised, tempered score."""
    scorer = Noisy(noise=noise, tau_end=tau_end, steps=steps)
    return Recipe(keep=Keep(_budget(tokens, fraction, recent), scorer), name="keyformer")


def snapkv(
    tokens: int = 1024,
    fraction: float = 0.5,
    window: int = 32,
    kernel: int = 7,
    pool: str = "avg",
    layers: str = "uniform",
) -> Recipe:
    """SnapKV (arXiv:2404.14469): once after the prompt, by its last queries, smoothed."""
    scorer = Observation(window=window, pool=pool, kernel=kernel)
    budget = _budget(tokens, fraction, window, layers)
    return Recipe(keep=Keep(budget, scorer, when="prompt"), name="snapkv")


def pyramidkv(tokens: int = 1024, fraction: float = 0.5, window: int = 32) -> Recipe:
    """PyramidKV (arXiv:2406.02069): SnapKV with more tokens in lower layers."""
    return snapkv(tokens, fraction, window, layers="pyramidkv")


def random(fraction: float = 0.5, recent: float = 0.5, sinks: int = 4) -> Recipe:
    """Random tokens beside the recent ones: the floor every score must beat."""
    keep = Keep(Budget(fraction=fraction, recent=recent), Random(), when="prompt")
    return Recipe(keep=keep, protect=Protect(sinks=sinks), name="random")
