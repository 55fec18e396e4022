"""Recipes that evict tokens after the prompt and after every step.

The prompt's own attention is exact. Each key/value head decides for itself, by the sum of its query
heads' scores. Evicted tokens free their memory. docs/recipes states how each recipe departs from
its paper. Options that they share:

tokens, fraction: the budget, in tokens or as a fraction of the prompt: one of the two.
recent: how many tokens of the budget (or which share of it) are the newest, whatever their score.
layers: how the rest is divided over layers. shared: all layers use one score, and so one choice.
limit: evict down to the budget only when a layer has more than this many tokens (0: every step).
positions: "original", or "renumbered" as if the evicted tokens had never been there.
sinks: the first tokens that stay, within the budget.
"""

from __future__ import annotations

from ...keep import Budget, Dilated, Keep, Mass, Noisy, Scorer, ValueAware
from ..parts import Protect
from ..spec import Recipe


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
    return _by_score(Mass(damping), fraction, recent, tokens, layers, shared, limit, positions)


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
    scorer = Noisy(noise, fixed, tau_end=tau_end, steps=steps)
    return _by_score(scorer, fraction, recent, tokens, layers, shared, limit, positions)


def vatp(
    fraction: float = 0.5, recent: int | float = 0.5, tokens: int = 0, sinks: int = 20
) -> Recipe:
    """VATP (arXiv:2406.12335): H2O's accumulated attention times the L1 norm of the value."""
    return _by_score(ValueAware(), fraction, recent, tokens, sinks=sinks)


def window(tokens: int = 1024, limit: int = 0) -> Recipe:
    """The newest tokens and nothing else."""
    return Recipe(keep=Keep(Budget(tokens=tokens), when=_when(limit), limit=limit or None))


def dilated(tokens: int = 1024, stride: int = 2) -> Recipe:
    """A dilated window (arXiv:2403.09054, figure 2): every second of twice as many tokens."""
    return Recipe(keep=Keep(Budget(tokens=tokens, recent=1), Dilated(stride)))


def streaming(tokens: int = 1024, sinks: int = 4, positions: str = "original") -> Recipe:
    """StreamingLLM (arXiv:2309.17453): attention sinks and the newest tokens.

    The paper's positions are `streaming:positions=renumbered`.
    """
    keep = Keep(Budget(tokens=tokens), positions=positions)
    return Recipe(keep=keep, protect=Protect(sinks=sinks))


def _by_score(
    scorer: Scorer,
    fraction: float,
    recent: int | float,
    tokens: int,
    layers: str = "uniform",
    shared: bool = False,
    limit: int = 0,
    positions: str = "original",
    sinks: int = 0,
) -> Recipe:
    budget = Budget(tokens or None, None if tokens else fraction, recent, layers)
    keep = Keep(
        budget, scorer, _when(limit), limit=limit or None, shared=shared, positions=positions
    )
    return Recipe(keep=keep, protect=Protect(sinks))


def _when(limit: int) -> str:
    return "limit" if limit else "step"
