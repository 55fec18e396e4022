"""The exact cache, and one part by itself: any score, index or format, built in or registered.

evict keeps the tokens with the highest score, recall reads those that an index finds, store packs
in one format. Options of the score, index or format follow: `evict:score=observation,window=64`.
A recipe file has the options that these recipes lack.
"""

from __future__ import annotations

from typing import Any

from ...errors import RecipeError
from ...keep import SCORERS, Budget, Keep, Outliers
from ...recall import INDEXES, Recall
from ...registry import Registry
from ...registry.fields import check_choice, missing_fields
from ...store import FORMATS, Store
from ..parts import Protect
from ..spec import Recipe

PARTS: dict[str, Registry] = {registry.what: registry for registry in (SCORERS, INDEXES, FORMATS)}
"""The options that choose a part whose own options a recipe passes on."""

GENERAL_OPTIONS = {"compress_after": int, "sliding": str}
"""The options that every recipe has: fields of `Recipe`, and their types."""


def full() -> Recipe:
    """Every token stays, exact; in fp32, the tokens of plain transformers."""
    return Recipe()


def evict(
    score: str = "mass",
    fraction: float = 0.5,
    recent: int | float = 0.5,
    tokens: int = 0,
    when: str = "step",
    sinks: int = 0,
    limit: int = 0,
    block: int = 0,
    **options: Any,
) -> Recipe:
    """Any score: a budget of tokens by score=NAME, then that score's options.

    tokens, fraction: the budget, in tokens or as a fraction of the prompt: one of the two. limit,
    block: tokens that when=limit and when=block need.
    """
    head_share = 1.0 if block else None  # later blocks are of heads that do not compete
    budget = Budget(tokens or None, None if tokens else fraction, recent, head_share=head_share)
    keep = Keep(
        budget, _part("score", score, options), when, limit=limit or None, block=block or None
    )
    return Recipe(keep=keep, protect=Protect(sinks))


def recall(
    index: str = "pages",
    tokens: int = 1024,
    sinks: int = 16,
    recent: int = 64,
    query_heads: str = "mean",
    full_layers: int = 2,
    **options: Any,
) -> Recipe:
    """Any index: everything stays, a step reads what index=NAME finds, then that index's options.

    query_heads: how they choose together. full_layers: first layers that read everything.
    """
    recalled = Recall(_part("index", index, options), tokens, query_heads, full_layers)
    return Recipe(recall=recalled, protect=Protect(sinks, recent))


def store(
    format: str = "packed",
    recent: int = 0,
    sinks: int = 0,
    outliers: int = 0,
    outlier_score: str = "mass",
    **options: Any,
) -> Recipe:
    """Any format: keys and values packed in format=NAME, then that format's options.

    packed is 4 bits per token where its options say nothing else. outliers: how many tokens
    of the prompt stay exact in each head, those with the highest outlier_score.
    """
    if format == "packed":
        options = {"bits": 4, "axis": "token", **options}
    packed = _part("format", format, options)
    protect = Protect(sinks, recent, outlier_rule(outliers, outlier_score))
    return Recipe(store=Store(packed, packed), protect=protect)


def outlier_rule(tokens: int, score: str) -> Outliers | None:
    """Return the rule for `tokens` outliers by the score of this name; None for no tokens."""
    if not tokens and score != "mass":
        raise RecipeError(
            f"outlier_score={score!r} chooses exact tokens, and outliers=0 of them; give outliers"
        )
    return Outliers(tokens, _part("score", score, {})) if tokens else None


def _part(what: str, name: str, options: dict[str, Any]) -> Any:
    if name not in PARTS[what]:  # listing all names loads plugins
        check_choice(what, name, PARTS[what])
    part = PARTS[what][name]
    if missing := missing_fields(part, options):
        raise RecipeError(f"{what} {name!r} needs a value: {missing[0]}=…")
    return part(**options)
