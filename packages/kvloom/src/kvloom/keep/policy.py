"""How many tokens a layer keeps, when it drops the others, and which stay exact.

Decides numbers only: scores are in `scorers`, the choice of tokens in `select`; the layer's cache
drops them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..errors import RecipeError
from ..registry.fields import check_choice, check_fields, check_whole
from . import budgets, head_budgets
from .fit import Fit
from .reconstruction import Reconstruction
from .rotated import Rotated
from .scorer import Scorer
from .scorers import SCORERS, Mass, Recent, Rule

WHEN = ("step", "prompt", "limit", "block")
REDUCTIONS = ("sum", "mean", "max")
FLOOR_TOKENS = 128  # the fewest tokens that a fraction of a prompt keeps
POSITIONS = ("original", "renumbered")


@dataclass(frozen=True)
class Budget:
    """How many tokens a layer keeps: a number of tokens, or a fraction of the first prompt.

    Attributes:
        tokens: The number.
        fraction: The fraction, in (0, 1]. It keeps 128 tokens or more, so that a short prompt stays
            whole.
        recent: How many of these are the newest tokens (int), or which share of the budget (float):
            1 is one token, 1.0 is all. The others are heavy hitters, chosen by score. Of a
            fraction, a number takes at most half.
        layers: How heavy hitters are divided over the layers: "uniform", "pyramid", "pyramidkv",
            "variance", "inverse-variance", "joint" (see head_share), or one weight for each layer.
        round_shares: Round the recent share and the heavy share of the prompt down separately, as
            MiniKV's code does; otherwise round the budget down, and then its recent share.
        head_share: The share of its heavy hitters that every head keeps in any case (AdaKV).
            The heads of a layer, or with layers="joint" of all layers with an equal keep and store,
            compete for the rest. None: all heads keep the same number.

    Raises:
        RecipeError: A value is out of range, or there are both tokens and a fraction, or neither.
    """

    tokens: int | None = None
    fraction: float | None = None
    recent: int | float = 1.0
    layers: str | tuple[float, ...] = "uniform"
    round_shares: bool = False
    head_share: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "fraction", "recent", "layers", "round_shares", "head_share")
        if (self.tokens is None) == (self.fraction is None):
            raise RecipeError(
                "a budget is either tokens or a fraction of the prompt, not "
                f"tokens={self.tokens!r} and fraction={self.fraction!r}; give one of the two"
            )
        if self.tokens is not None:
            check_whole("budget tokens", self.tokens, 1)
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise RecipeError(f"budget fraction={self.fraction!r} must lie in (0, 1]")
        window, share = self.recent_tokens, self.recent_share
        if share is not None and not 0 <= share <= 1:
            raise RecipeError(f"recent={share!r} must lie in [0, 1], or be a whole number")
        if window is not None and window < 0:
            raise RecipeError(f"recent={window!r} must be 0 or more")
        if self.tokens is not None and window is not None and window > self.tokens:
            raise RecipeError(
                f"a recent window of {window} tokens does not fit a budget of {self.tokens}; "
                "use a smaller window or a larger budget"
            )
        if isinstance(self.layers, str):
            check_choice("layers", self.layers, budgets.POLICIES)
        elif not all(0 <= weight < math.inf for weight in self.layers) or not any(self.layers):
            raise RecipeError(
                f"layers={self.layers!r} must be one weight a layer, 0 or more, not all 0"
            )
        if self.head_share is not None and not 0 <= self.head_share <= 1:
            raise RecipeError(
                f"head_share={self.head_share!r} must lie in [0, 1]; use 0.2 as AdaKV does"
            )
        if self.layers == "joint" and self.head_share is None:
            raise RecipeError(
                'layers="joint" divides a budget over heads; give head_share, such as 0.2, too, to '
                "a recipe that takes it, such as snapkv"
            )

    @property
    def recent_tokens(self) -> int | None:
        """How many tokens to keep are the newest; None where `recent` is a share."""
        return self.recent if isinstance(self.recent, int) else None

    @property
    def recent_share(self) -> float | None:
        """Which share of the tokens to keep are the newest; None where `recent` is a number."""
        return None if isinstance(self.recent, int) else self.recent

    def resized(self, size: int | float) -> Budget:
        """Return it with another size: tokens (int), or a fraction of the prompt (float)."""
        if isinstance(size, int):
            return replace(self, tokens=size, fraction=None)
        return replace(self, tokens=None, fraction=size)

    def resolve(self, prompt_tokens: int) -> int:
        """Return the tokens to keep, averaged over layers."""
        if self.tokens is not None:
            return self.tokens
        if self.round_shares and self.recent_share is not None:
            shares = self.recent_share, 1 - self.recent_share
            return sum(self._part(prompt_tokens, share) for share in shares)
        return int(self._of_prompt(prompt_tokens))

    def recent_of(self, prompt_tokens: int) -> int:
        """Return how many of the tokens to keep are the newest."""
        total, share = self.resolve(prompt_tokens), self.recent_share
        if share is None:
            return min(self.recent_tokens or 0, total if self.fraction is None else total // 2)
        if self.round_shares and self.fraction is not None:
            return self._part(prompt_tokens, share)
        return int(total * share)

    def _of_prompt(self, prompt_tokens: int) -> float:
        """Return the fraction of a prompt in tokens, before it is rounded."""
        assert self.fraction is not None
        return max(FLOOR_TOKENS, prompt_tokens * self.fraction)

    def _part(self, prompt_tokens: int, share: float) -> int:
        """Return a share of the fraction of a prompt in tokens, as one share of the prompt.

        0.4 * 0.75 is a little more than 0.3, and 1 - 0.9 a little less than 0.1.
        """
        assert self.fraction is not None
        return int(max(FLOOR_TOKENS * share, prompt_tokens * round(self.fraction * share, 12)))

    def heavy(
        self, prompt_tokens: int, layers: int, variances: Sequence[float] | None = None
    ) -> list[int]:
        """Return the heavy hitters of each layer; their sum is `layers` times the average.

        The sum is smaller only where the prompt has fewer tokens. A prompt within the budget stays
        whole in every layer. PyramidKV's division is uniform for a prompt shorter than twice the
        average, as in KVCache-Factory.

        Args:
            prompt_tokens: Tokens of the first prompt.
            layers: How many layers share the budget.
            variances: Of each layer's attention mass, for the policies by variance.

        Raises:
            RecipeError: A pyramid has an empty top, or a layer no token.
        """
        total, window = self.resolve(prompt_tokens), self.recent_of(prompt_tokens)
        average, largest = total - window, prompt_tokens - window
        short = self.layers == "pyramidkv" and prompt_tokens < 2 * average
        if total >= prompt_tokens or short or not layers:
            return [average] * layers
        weights = budgets.weights(self.layers, layers, variances, largest / max(1, average))
        divided = budgets.split(average * layers, weights, largest)
        pyramid = self.layers in budgets.DEPTH
        if total > window and min(divided) == 0 and (pyramid or window == 0):
            raise RecipeError(
                f"a budget of {total} tokens, {window} of them recent, divided by layers="
                f"{self.layers!r} leaves layer {divided.index(0)} of {layers} without a heavy "
                "hitter; use a larger budget, or divide it more evenly"
            )
        return divided


@dataclass(frozen=True)
class Keep:
    """Evict all tokens but a budget of them, chosen per key/value head.

    Where layers wait for each other (shared, budgets by variance, or layers="joint"), the prompt of
    all of them stays exact until the last layer has scored.

    Attributes:
        budget: How many tokens stay, protected sinks included.
        scorer: The score that decides which tokens stay.
        when: "step": after the prompt and at every step; "prompt": once, after the first prompt;
            "limit": down to the budget whenever a layer has more than `limit` tokens; "block":
            after the first prompt, and then from each block of `block` tokens that is older than
            the recent ones, but from the next one, which stays whole. A token is scored once.
        limit: Tokens that a layer may have before it evicts, for when="limit".
        block: Tokens of a block, for when="block".
        query_heads: How their scores become that of the key/value head: "sum", "mean" or "max".
        shared: All layers use one score, the sum of theirs, and so keep the same tokens.
        positions: "original", or "renumbered": as if the evicted tokens had never been there.
        seed: Of noise and of random scores; its lowest 32 bits count.
        fit: How the values of the tokens that stay are fitted; None: they stay as they are.

    Raises:
        RecipeError: A value is out of range, or two do not combine.
    """

    budget: Budget
    scorer: Scorer = field(default_factory=Recent)
    when: str = "step"
    limit: int | None = None
    query_heads: str = "sum"
    shared: bool = False
    positions: str = "original"
    seed: int = 0
    fit: Fit | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "budget", "shared", "seed", "fit")
        if self.block is not None:
            check_whole("block", self.block, 1, " of tokens")
        if not isinstance(self.scorer, Scorer):
            raise RecipeError(f"scorer={self.scorer!r} is not one of {', '.join(SCORERS)}")
        check_choice("when", self.when, WHEN)
        check_choice("query_heads", self.query_heads, REDUCTIONS)
        check_choice("positions", self.positions, POSITIONS)
        if self.scorer.reads_ids:
            raise RecipeError(
                f"score {self.scorer.kind!r} reads token ids, which later steps do not keep; use "
                "it as the rule of protect.outliers, or another score"
            )
        if self.scorer.repeats:
            self._check_repeats(self.scorer)
        if self.scorer.of_prompt and not self.scores_once:
            raise RecipeError(
                f"score {self.scorer.kind!r} scores a whole prompt, so it cannot score steps "
                f'(when={self.when!r}); use when="prompt" or "block"'
            )
        if self.fit is not None and not self.scorer.of_prompt:
            raise RecipeError(
                f"fit needs the queries of a whole prompt, and score {self.scorer.kind!r} also "
                "scores steps; use the score rotated or reconstruction"
            )
        if self.fit is not None and self.renumbers:
            raise RecipeError('fit attends to tokens where they are; use positions="original"')
        if (self.limit is not None) != (self.when == "limit"):
            raise RecipeError(
                f"limit={self.limit!r} with when={self.when!r}; give a limit with "
                'when="limit", and only then'
            )
        if (self.block is not None) != (self.when == "block"):
            raise RecipeError(
                f"block={self.block!r} with when={self.when!r}; give a block with "
                'when="block", and only then'
            )
        if self.block is not None:
            self._check_blocks()
        if self.budget.head_share is not None:
            self._check_heads()
        if self.by_age:
            self._check_age()
        if self.shared and not self.scores_once:
            self._check_shared()
        if self.limit is not None:
            least = self.budget.tokens or 1
            check_whole("limit", self.limit, least, " of tokens, not below the budget")

    def _check_blocks(self) -> None:
        """Check what eviction from blocks cannot do."""
        budget = self.budget
        if budget.fraction is None or budget.head_share is None:
            raise RecipeError(
                'when="block" keeps a fraction of each block, which heads divide among them; give '
                "a budget with a fraction and head_share (1: heads do not compete)"
            )
        if budget.layers not in ("uniform", "joint"):
            raise RecipeError(
                f'when="block" keeps the same fraction in all layers; use layers="uniform" or '
                f'"joint", not {budget.layers!r}'
            )

    def _check_repeats(self, scorer: Scorer) -> None:
        """Check a score for which the model repeats the prompt."""
        if not isinstance(scorer, Reconstruction):
            raise RecipeError(
                f"score {scorer.kind!r} sets repeats=True but does not define the repetition; "
                "derive it from Reconstruction"
            )
        if self.when != "prompt":
            raise RecipeError(
                f"score {scorer.kind!r} repeats the first prompt, and no later text "
                f'(when={self.when!r}); use when="prompt", or another score, such as rotated'
            )

    def _check_age(self) -> None:
        """Check what eviction by age cannot do."""
        if self.when == "prompt":
            raise RecipeError(
                "score 'recent' evicts at every step, and not once; use when=\"step\""
            )
        if self.budget.layers != "uniform":
            raise RecipeError(
                f"score 'recent' keeps the same tokens in all layers, which layers="
                f'{self.budget.layers!r} does not; use "uniform"'
            )

    def _check_shared(self) -> None:
        """Check what layers with one score at every step cannot do."""
        layers = self.budget.layers
        equal_weights = not isinstance(layers, str) and len(set(layers)) == 1
        if layers not in ("uniform", *budgets.BY_VARIANCE) and not equal_weights:
            raise RecipeError(
                f"shared=True sums the scores of all layers at every step, and layers={layers!r} "
                'leaves layers with different numbers of tokens; use layers="uniform", or '
                'when="prompt"'
            )

    def _check_heads(self) -> None:
        """Check what heads with different numbers of tokens cannot do."""
        heads = f"head_share={self.budget.head_share:g}"
        if not self.scores_once or self.by_age:
            raise RecipeError(
                f"{heads} divides a budget over heads by the scores of the prompt, once; use it "
                'with a score and when="prompt" or "block"'
            )
        if self.renumbers:
            raise RecipeError(
                f"{heads} leaves heads with different numbers of tokens, and positions="
                f'{self.positions!r} needs equal numbers; use "original"'
            )
        if self.shared:
            raise RecipeError(
                f"{heads} and shared=True conflict: one gives each head its own tokens, the other "
                "gives all layers the same tokens; leave one out"
            )

    def head_shares(self, prompt_tokens: int, room: int, heads: int, unit: int) -> tuple[int, int]:
        """Return the tokens that each head of a layer keeps in any case, and the contested ones.

        Args:
            prompt_tokens: Tokens of the first prompt.
            room: Tokens that the layer keeps, averaged over its heads.
            heads: Key/value heads of the layer.
            unit: Tokens that are packed together.
        """
        if self.budget.head_share is None or room >= prompt_tokens:
            return room, 0
        window = self.budget.recent_of(prompt_tokens)
        guaranteed, contested = head_budgets.shares(
            room - window, prompt_tokens - room, self.budget.head_share, heads, unit
        )
        return guaranteed + window, contested

    def first_block(
        self, prompt_tokens: int, sinks: int, stored: int, heads: int, unit: int
    ) -> tuple[int, int]:
        """Return the tokens of the first block, and those that all heads keep of it together.

        The block is the prompt without its recent tokens; the budget includes all that wait.

        Args:
            prompt_tokens: Tokens of the first prompt.
            sinks: First tokens, which are in no block.
            stored: The tokens after them, so far.
            heads: Key/value heads of the layer.
            unit: Tokens that are packed together.
        """
        count = max(0, stored - self.budget.recent_of(prompt_tokens)) // unit * unit
        others = sinks + stored - count
        wanted = heads * (self.budget.resolve(prompt_tokens) - others)
        return count, head_budgets.granted(wanted, heads, count, unit)

    def layer_tokens(self, prompt_tokens: int, layers: int) -> list[int]:
        """Return the tokens that each layer keeps at most, averaged over its heads.

        A budget that depends on scores is counted as if it were uniform.
        """
        budget = self.budget
        if budget.layers in budgets.BY_VARIANCE:
            budget = replace(budget, layers="uniform")
        window = budget.recent_of(prompt_tokens)
        return [heavy + window for heavy in budget.heavy(prompt_tokens, layers)]

    def drops(self, tokens: int) -> bool:
        """Return whether a layer with `tokens` tokens evicts down to its budget."""
        return self.limit is None or tokens > self.limit

    @property
    def scores_once(self) -> bool:
        """Whether each token is scored once: with the prompt, or with its block."""
        return self.when in ("prompt", "block")

    @property
    def renumbers(self) -> bool:
        """Whether tokens that stay get consecutive positions."""
        return self.positions != "original"

    @property
    def needs_rope(self) -> bool:
        """Whether the score or the fit needs the model's rotary embedding."""
        return self.scorer.needs_rope or self.fit is not None

    def needs_examples(self, tokens: int) -> bool:
        """Return whether the score learns from examples of a prompt of `tokens` tokens."""
        scorer = self.scorer
        learns = isinstance(scorer, Rotated) and 0 < scorer.least_prompt <= tokens
        return learns and self.budget.resolve(tokens) < tokens

    @property
    def rotates_queries(self) -> bool:
        """Whether the score or the fit rotates the queries of a prompt."""
        return self.scorer.rotates_queries or self.fit is not None

    @property
    def without_rotation(self) -> Keep:
        """This without rotated queries: see `Scorer.without_rotation`. No values are fitted."""
        scorer = self.scorer.without_rotation
        keep = self.prompt_only if scorer.repeats else self
        return replace(keep, scorer=scorer, fit=None) if self.rotates_queries else self

    def within(self, positions: int) -> Keep:
        """Return this for a model with so many positions.

        Queries rotate past their chunk at least, so a chunk has at most half of the positions.
        """
        scorer, fit, most = self.scorer, self.fit, max(1, positions // 2)
        if isinstance(scorer, Rotated):
            scorer = replace(scorer, chunk=min(scorer.chunk, most))
        if fit is not None:
            fit = replace(fit, chunk=min(fit.chunk, most))
        return replace(self, scorer=scorer, fit=fit)

    @property
    def prompt_only(self) -> Keep:
        """This, evicting from the first prompt alone: later tokens stay."""
        return self if self.block is None else replace(self, when="prompt", block=None)

    @property
    def needs_all_heads(self) -> bool:
        """Whether a decision for one head needs the scores of all heads of its layer."""
        return self.budget.layers in budgets.BY_VARIANCE or self.budget.head_share is not None

    @property
    def waits_for_layers(self) -> bool:
        """Whether an eviction from the prompt needs the scores of other layers."""
        return self.shared or self.budget.layers in ("joint", *budgets.BY_VARIANCE)

    @property
    def by_age(self) -> bool:
        """Whether age alone decides: the oldest tokens are evicted, and nothing is scored."""
        return isinstance(self.scorer, Recent)


@dataclass(frozen=True)
class Outliers:
    """Tokens of a prompt that stay exact beside the first and the newest: by default heavy hitters.

    SKVQ (arXiv:2405.06219, section 3.3) calls this a filter rule. A rule is a score, or any
    function of a `Step` (with the attribute `reads_ids` where it needs token ids). The tokens of
    each head with the highest scores stay exact. Plus infinity always includes a token as far as
    `tokens` allows, minus infinity excludes it as far as there are others.

    Attributes:
        tokens: How many, of each key/value head.
        scorer: The rule: a score, or a function of a `Step`.
        query_heads: How their scores become that of the key/value head: "sum", "mean" or "max".
    """

    tokens: int
    scorer: Scorer | Rule = field(default_factory=Mass)
    query_heads: str = "sum"

    def __post_init__(self) -> None:
        check_whole("outliers tokens", self.tokens, 1)
        if not callable(self.scorer):
            raise RecipeError(
                f"scorer={self.scorer!r} is not a score: give one of {', '.join(SCORERS)}, or a "
                "function of a Step"
            )
        if isinstance(self.scorer, Recent):
            raise RecipeError(
                "score 'recent' has no outliers: protect.exact_recent keeps new tokens exact; "
                "use another score for outliers"
            )
        if isinstance(self.scorer, Scorer) and (self.scorer.repeats or self.scorer.needs_rope):
            does = "repeats the prompt" if self.scorer.repeats else "rotates the prompt's queries"
            raise RecipeError(
                f"score {self.scorer.kind!r} {does}, which outliers do not wait for; "
                "use another score for outliers"
            )
        check_choice("query_heads", self.query_heads, REDUCTIONS)

    @property
    def reads_ids(self) -> bool:
        """Whether the rule reads `Step.ids`."""
        return bool(getattr(self.scorer, "reads_ids", False))
