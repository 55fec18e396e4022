"""Expected Attention (arXiv:2510.00636): evict once after the prompt, by what later queries expect.

Later queries are taken as Gaussian: their mean and covariance are those of the prompt's queries
before RoPE, rotated to the next `future` positions. A token's score is the attention that such
queries are expected to pay to it, times the length of its value. It needs no second pass.

Departures: one decision per key/value head, by the mean of its query heads' weights, as in
kvpress; the newest `recent` tokens stay (kvpress: recent=0); softcapped logits are capped after the
expectation; padding takes part in nothing.

Options:

tokens, fraction: the budget, in tokens or as a fraction of the prompt where it is given.
sinks, recent: the first and the newest tokens that stay, within the budget.
future: later positions. epsilon: added to a weight before it is multiplied by the value's length.
layers, positions: as in snapkv. store: the recipe whose format the tokens have ("kivi-4").
"""

from __future__ import annotations

from ...keep import Budget, Expected, Keep
from ..spec import Protect, Recipe
from .stored import stored_as


def expected(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    future: int = 512,
    epsilon: float = 0.0,
    layers: str = "uniform",
    positions: str = "original",
    store: str = "full",
) -> Recipe:
    """Expected Attention (arXiv:2510.00636): once after the prompt, by expected later queries."""
    budget = Budget(None if fraction else tokens, fraction or None, recent, layers)
    scorer = Expected(future, epsilon, sinks)
    keep = Keep(budget, scorer, when="prompt", group="mean", positions=positions)
    return stored_as(store, Recipe(keep=keep, protect=Protect(sinks)))
