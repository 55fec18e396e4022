"""Recipes that evict tokens once, after the first prompt. Later tokens stay.

docs/recipes states how each recipe departs from its paper.

Options that they share:

tokens, fraction: the budget, in tokens or as a fraction of the prompt: one of the two.
sinks, recent: the first and the newest tokens that stay, within the budget.
layers: how the rest is divided over layers.
head_share: the share of the rest of which every key/value head is certain (AdaKV,
arXiv:2407.11550: 0.2). The heads of a layer compete for what is left, or with layers=joint those of
all layers. With 1, they do not compete.
positions: "original", or "renumbered" as if the evicted tokens had never been there.
store: the recipe whose format the tokens have ("kivi-4").
"""

from __future__ import annotations

from dataclasses import replace

from ...errors import RecipeError
from ...keep import (
    Budget,
    Expected,
    Fit,
    Keep,
    KeyNorm,
    Mass,
    Observation,
    Random,
    Reconstruction,
    Rotated,
    Scorer,
    TriAttention,
)
from ...store import Packed, Store
from ..parts import Protect
from ..spec import Recipe


def snapkv(
    tokens: int = 1024,
    fraction: float = 0.0,
    window: int = 32,
    kernel: int = 7,
    pool: str = "avg",
    layers: str = "uniform",
    positions: str = "original",
    head_share: float = 1.0,
) -> Recipe:
    """SnapKV (arXiv:2404.14469): once after the prompt, by its last queries, smoothed."""
    scorer = Observation(window, pool, kernel)
    return _once(
        scorer,
        tokens,
        fraction,
        0,
        window,
        layers=layers,
        positions=positions,
        head_share=head_share,
    )


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


def knorm(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    store: str = "full",
) -> Recipe:
    """Key norm (arXiv:2406.11430): once after the prompt, the tokens with the shortest keys."""
    return _once(KeyNorm(), tokens, fraction, sinks, recent, store=store)


def random(
    fraction: float = 0.5, recent: int | float = 0.5, tokens: int = 0, sinks: int = 4
) -> Recipe:
    """Random tokens beside the recent ones: the baseline that every score must beat."""
    budget = Budget(tokens or None, None if tokens else fraction, recent)
    return Recipe(keep=Keep(budget, Random(), when="prompt"), protect=Protect(sinks))


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
    """Expected Attention (arXiv:2510.00636): once after the prompt, by expected later queries.

    Later queries are taken as Gaussian: their mean and covariance are those of the prompt's queries
    before RoPE, rotated to the next `future` positions. A token's score is the attention that such
    queries are expected to pay to it, plus `epsilon`, times the length of its value.
    """
    scorer = Expected(future, epsilon)
    return _once(
        scorer, tokens, fraction, sinks, recent,
        query_heads="mean", layers=layers, positions=positions, store=store,
    )  # fmt: skip


def kvzip(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    chunk: int = 2048,
    instruction: str = "none",
    layers: str = "uniform",
    positions: str = "original",
    store: str = "full",
    head_share: float = 1.0,
    fit: bool = False,
) -> Recipe:
    """KVzip (arXiv:2505.23416): once after the prompt, by attention while the model repeats it.

    After the prompt, the model reads it again in chunks of `chunk` tokens. A token's score is the
    largest attention weight that it receives while its chunk is repeated, over all query heads of
    its key/value head. Nothing in the score depends on a question, so one cache serves many. The
    extra pass costs more than the prompt itself.

    instruction: token ids before each chunk, separated by spaces, or none. fit: change the values
    that stay, so that they replace all values, as for `rotated`.
    """
    scorer = Reconstruction(chunk, instruction)
    return _once(
        scorer, tokens, fraction, sinks, recent,
        query_heads="max", layers=layers, positions=positions, head_share=head_share, store=store,
        fit=Fit(chunk) if fit else None,
    )  # fmt: skip


def rotated(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    chunk: int = 2048,
    layers: str = "uniform",
    positions: str = "original",
    store: str = "full",
    head_share: float = 1.0,
    contribution: bool = True,
    fit: bool = False,
    block: int = 0,
    examples: int = 0,
    neighbors: float = 0.0,
) -> Recipe:
    """KVzip without a second reading: by the prompt's own queries, at later positions.

    The queries of a repeated token are nearly its own queries, so they are rotated to the positions
    after the prompt. A token's score is the largest weight that such a query pays to it, over all
    query heads of its key/value head, times the norm of its value, over the mean norm of the
    layer's input. `Rotated` has the formula. It needs no token ids, and no positions that the model
    has not learned.

    chunk: the most tokens whose queries are rotated together, and which see each other and sinks.
    contribution: false leaves the two norms out. fit: change the values that stay, so that they
    replace all values (`Fit`). block: evict from later text, too, in blocks of so many tokens, of
    which the first stays; 0: later tokens stay. examples: first tokens of the prompt that the model
    reads three times, to learn how a repetition changes queries; a prompt of less than six times as
    many has none. neighbors: the share of both neighbors' scores that is added to a score.

    With ALiBi, latents (MLA) and a rotary embedding that changes with the length, the model repeats
    the prompt instead, as for `kvzip`.
    """
    return _once(
        Rotated(chunk, contribution, examples, neighbors), tokens, fraction, sinks, recent,
        query_heads="max", layers=layers, positions=positions, head_share=head_share, store=store,
        fit=Fit(chunk) if fit else None, block=block,
    )  # fmt: skip


def triattention(
    tokens: int = 1024,
    fraction: float = 0.0,
    sinks: int = 4,
    recent: int = 32,
    layers: str = "uniform",
    positions: str = "original",
    store: str = "full",
    head_share: float = 1.0,
    furthest: int = 65536,
    block: int = 0,
) -> Recipe:
    """TriAttention (arXiv:2604.04921): by the mean of the queries before RoPE.

    A token's score is its key's logit for the mean query, on average over later positions, and the
    lengths of its key's pairs of channels where queries differ. `TriAttention` has the formula.

    furthest: the furthest later position. block: evict from later text, too, in blocks of so many
    tokens (128 is the paper's interval), of which the first stays; 0: later tokens stay.
    """
    return _once(
        TriAttention(furthest), tokens, fraction, sinks, recent,
        query_heads="max", layers=layers, positions=positions, head_share=head_share, store=store,
        block=block,
    )  # fmt: skip


def minikv(
    fraction: float = 0.5,
    recent: int | float = 0.5,
    bits: int | float = 2,
    group: int = 16,
    residual: int = 128,
    layers: str = "uniform",
) -> Recipe:
    """MiniKV (arXiv:2411.18077): heavy hitters and recent tokens of the prompt, in 2 bits.

    Heavy hitters are chosen by accumulated attention over the whole prompt, beside a recent window,
    each share rounded down to whole tokens (section 3.1). What stays is packed; generated tokens
    gather in an exact buffer of `residual`.
    """
    budget = Budget(fraction=fraction, recent=recent, layers=layers, round_shares=True)
    return _minikv(budget, Mass(), bits, group, residual)


def minikv_pyramid(
    fraction: float = 0.5,
    recent: int | float = 0.5,
    bits: int | float = 2,
    group: int = 16,
    residual: int = 128,
) -> Recipe:
    """MiniKV with more heavy hitters in lower layers.

    The pyramid is that of section 3.2. As in the official code the lower layers get more, where the
    paper's formula has the ends swapped.
    """
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
    keys, values = (
        Packed(bits, axis, group, residual=residual, unit=group) for axis in ("channel", "token")
    )
    return Recipe(keep=Keep(budget, scorer, when="prompt"), store=Store(keys, values))


def _once(
    scorer: Scorer,
    tokens: int,
    fraction: float,
    sinks: int,
    recent: int | float,
    *,
    query_heads: str = "sum",
    layers: str = "uniform",
    head_share: float = 1.0,
    positions: str = "original",
    store: str = "full",
    fit: Fit | None = None,
    block: int = 0,
) -> Recipe:
    budget = Budget(
        None if fraction else tokens, fraction or None, recent, layers,
        head_share=None if head_share == 1 and not block else head_share,
    )  # fmt: skip
    keep = Keep(
        budget, scorer, when="block" if block else "prompt", query_heads=query_heads,
        positions=positions, fit=fit, block=block or None,
    )  # fmt: skip
    return _stored_as(store, Recipe(keep=keep, protect=Protect(sinks)))


def _stored_as(name: str, recipe: Recipe) -> Recipe:
    """Return `recipe` with the format and the exact recent tokens of the recipe `name`.

    Raises `RecipeError` for a recipe that does more than store.
    """
    from . import RECIPES  # the registry has this recipe's function too

    if name not in RECIPES:
        raise RecipeError(f"store={name!r} names no recipe; use one that packs, such as kivi-4")
    other = RECIPES[name]()
    if other.keep is not None or other.recall is not None or other.protect.outliers is not None:
        raise RecipeError(
            f"store={name!r} also selects tokens; use a recipe that only packs, such as kivi-4"
        )
    protect = replace(recipe.protect, exact_recent=other.protect.exact_recent)
    return replace(recipe, store=other.store, protect=protect)
