"""Eviction by attention: H2O, Keyformer, SnapKV, PyramidKV.

These recipes sum the scores of a key/value head's query heads, and each key/value head decides for
itself. Evicted tokens free their memory.

Departures: H2O's and SnapKV's official code decides per query head. H2O's code counts a step's own
token in the recent window, so that it attends to one token fewer. SnapKV's experiments pool by
maximum. KVCache-Factory rounds PyramidKV's step between layers down; here the layers sum up to the
budget.

Options they share:

tokens, fraction: the budget, in tokens or as a fraction of the prompt. h2o, keyformer and random
use the fraction unless tokens is given; snapkv and pyramidkv use tokens unless fraction is given.
recent: how many tokens of the budget (or which share of it) are the newest, whatever their score.
layers: how the rest is divided over layers. heads (snapkv): the share of the rest that every
key/value head is certain of; the heads of a layer compete for what is left by their scores, or with
layers=joint those of all layers (AdaKV, arXiv:2407.11550: 0.2).
shared: all layers use one score, and so one choice.
limit: evict down to the budget only when a layer has more than this many tokens (0: every step).
positions: "original", or "renumbered" as if the evicted tokens had never been there.
"""

from __future__ import annotations

from ...keep import Budget, Keep, Mass, Noisy, Observation, Random, Scorer
from ..spec import Protect, Recipe
from .stored import share


def _recipe(
    scorer: Scorer,
    tokens: int,
    fraction: float,
    recent: int | float,
    *,
    layers: str = "uniform",
    when: str = "step",
    shared: bool = False,
    limit: int = 0,
    positions: str = "original",
    sinks: int = 0,
    heads: float = 1.0,
) -> Recipe:
    budget = Budget(
        tokens or None, None if tokens else fraction, recent, layers, heads=share(heads)
    )
    when = "limit" if limit else when
    keep = Keep(budget, scorer, when=when, limit=limit or None, shared=shared, positions=positions)
    return Recipe(keep=keep, protect=Protect(sinks=sinks))


def h2o(
    fraction: float = 0.5,
    recent: int | float = 0.5,
    tokens: int = 0,
    layers: str = "uniform",
    shared: bool = False,
    limit: int = 0,
    positions: str = "original",
    damping: float = 1.0,
) -> Recipe:
    """H2O (arXiv:2306.14048): heavy hitters by accumulated attention, half of it recent."""
    return _recipe(
        Mass(damping), tokens, fraction, recent,
        layers=layers, shared=shared, limit=limit, positions=positions,
    )  # fmt: skip


def keyformer(
    fraction: float = 0.5,
    recent: int | float = 0.3,
    tokens: int = 0,
    layers: str = "uniform",
    shared: bool = False,
    limit: int = 0,
    positions: str = "original",
    noise: str = "gumbel",
    fixed: bool = False,
    tau_end: float = 2.0,
    steps: int = 128,
) -> Recipe:
    """Keyformer (arXiv:2403.09054): key tokens by a Gumbel-noised, tempered score.

    The paper's other budget is `keyformer:fraction=0.7`.
    """
    return _recipe(
        Noisy(noise, fixed, tau_end=tau_end, steps=steps), tokens, fraction, recent,
        layers=layers, shared=shared, limit=limit, positions=positions,
    )  # fmt: skip


def snapkv(
    tokens: int = 1024,
    fraction: float = 0.0,
    window: int = 32,
    kernel: int = 7,
    pool: str = "avg",
    layers: str = "uniform",
    positions: str = "original",
    heads: float = 1.0,
) -> Recipe:
    """SnapKV (arXiv:2404.14469): once after the prompt, by its last queries, smoothed."""
    return _recipe(
        Observation(window, pool, kernel), 0 if fraction else tokens, fraction, window,
        layers=layers, when="prompt", positions=positions, heads=heads,
    )  # fmt: skip


def pyramidkv(
    tokens: int = 1024,
    fraction: float = 0.0,
    window: int = 32,
    kernel: int = 7,
    pool: str = "avg",
    positions: str = "original",
) -> Recipe:
    """PyramidKV (arXiv:2406.02069): SnapKV with more tokens in lower layers.

    Uniform where the prompt is shorter than twice (budget - window), as in KVCache-Factory.
    """
    return snapkv(tokens, fraction, window, kernel, pool, "pyramidkv", positions)


def random(
    fraction: float = 0.5, recent: int | float = 0.5, tokens: int = 0, sinks: int = 4
) -> Recipe:
    """Random tokens beside the recent ones: the baseline that every score must beat."""
    return _recipe(Random(), tokens, fraction, recent, when="prompt", sinks=sinks)
