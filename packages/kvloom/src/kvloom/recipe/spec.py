"""A recipe: which tokens stay, in what format, which of them a step reads, what is protected.

Recipes are frozen plain data, validated when they are made: `combinations` says which parts do not
combine, `model_problems` what does not fit a model. `predict` computes their bytes, `text` reads
and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from ..errors import IncompatibleRecipe, RecipeError
from ..keep import Budget, Keep
from ..recall import Recall
from ..registry.fields import check_choice, check_fields, check_whole
from ..store import Format, Store
from . import text
from .combinations import check_parts
from .geometry import Geometry, SlidingLayer
from .layers import select
from .model_problems import WINDOW_DROP, model_problems
from .parts import BudgetGroup, LayerOverride, Protect, Tuned
from .predict import predicted_layer_nbytes, predicted_token_nbytes


@dataclass(frozen=True)
class Recipe:
    """Which tokens to keep, how to store them, which to recall, and which to protect from all that.

    Attributes:
        keep: Which tokens stay; None: all.
        store: The formats of keys and values.
        recall: Which stored tokens a step reads; None: all.
        protect: Tokens that are exempt from eviction, from packing, or from both.
        name: The name that reports print.
        layers: Overrides for some layers; of two for one layer, the later one wins.
        compress_after: Everything stays exact until the context exceeds this many tokens; then all
            tokens so far are treated as one prompt. Until then a score holds their queries, too:
            Hq / (2 Hk) times the bytes of the exact cache.
        sliding: "exact": layers with a sliding window stay as transformers has them. "packed": they
            store their windows in the formats of `store`; this does not combine with
            `compress_after`.
        tuned: Where a tuned recipe comes from; other models refuse the recipe.

    Raises:
        RecipeError: A value is out of range, or two parts do not combine.
    """

    keep: Keep | None = None
    store: Store = field(default_factory=Store)
    recall: Recall | None = None
    protect: Protect = field(default_factory=Protect)
    name: str = "custom"
    layers: tuple[LayerOverride, ...] = ()
    compress_after: int = 0
    tuned: Tuned | None = None
    sliding: str = "exact"

    def __post_init__(self) -> None:
        check_fields(self, "keep", "store", "recall", "protect", "name", "layers", "tuned")
        check_whole("compress_after", self.compress_after, 0, " of tokens")
        check_choice("sliding", self.sliding, ("exact", "packed"))
        check_parts(self)

    @property
    def pinned_prefix(self) -> int:
        """The number of leading kept tokens that every recall step reads.

        The sinks; where packed tokens move to a tier, rounded up to whole blocks.
        """
        if self.keep is None or self.recall is None:
            return 0
        unit = 1 if self.recall.tier is None else self.store.block_tokens
        return -(-self.protect.sinks // unit) * unit

    @property
    def always_read(self) -> int:
        """The number of tokens that every recall step reads: the prefix and the exact recent."""
        return max(self.protect.sinks, self.pinned_prefix) + max(self.protect.exact_recents)

    @property
    def reads_queries(self) -> bool:
        """Whether the prompt's queries are needed: to score tokens, find outliers, or index."""
        scored = self.keep is not None and not self.keep.by_age
        indexed = self.recall is not None and self.recall.index.reads_queries
        return scored or indexed or self.protect.outliers is not None

    @property
    def uses_input_norms(self) -> bool:
        """Whether the score reads the norms of the layers' inputs."""
        return self.keep is not None and self.keep.scorer.uses_input_norms

    @property
    def formats_and_recents(self) -> tuple[tuple[Format | None, int], ...]:
        """The format and the number of exact newest tokens of keys and of values."""
        formats = self.store.keys, self.store.values
        return tuple(zip(formats, self.protect.exact_recents, strict=True))

    @property
    def stores(self) -> tuple[Store, ...]:
        """The store of the recipe and those of its overrides."""
        parts = [override.parts for override in self.layers]
        return (self.store, *(x["store"] for x in parts if "store" in x))

    @property
    def exact(self) -> bool:
        """Whether every layer stores and reads every token exactly, as `full` does."""
        return not self.recalls and all(x.keep is None and x.store.exact for x in self._plain)

    @property
    def recalls(self) -> bool:
        """Whether a step of some layer reads a choice of its tokens."""
        return any(recipe.recall is not None for recipe in self._plain)

    @property
    def reuse(self) -> str:
        """Which part of a stored prompt a later prompt may reuse: see `PromptStore`.

        "blocks": any beginning, as nothing that follows changes which tokens are stored or read.
        "whole": what was read as one prompt.
        """
        chooses = self.budgeted or any(x.protect.outliers is not None for x in self._plain)
        return "whole" if chooses else "blocks"

    @property
    def budgeted(self) -> bool:
        """Whether it has a budget: of tokens that a step recalls, or else of tokens kept."""
        return any(recipe.recall is not None or recipe.keep is not None for recipe in self._plain)

    def with_budget(self, budget: int | float, prompt_tokens: int | None = None) -> Recipe:
        """Return it with another budget; a recipe that is not `budgeted` stays as it is.

        Args:
            budget: In tokens (int), or as a fraction of the prompt (float).
            prompt_tokens: The prompt's tokens; a recipe that recalls needs them for a fraction.

        Raises:
            RecipeError: The budget is out of range.
        """
        overrides = []
        for override in self.layers:
            parts = self._overridden(override)._budget_parts(budget, prompt_tokens)
            changed = {name: part for name, part in parts.items() if name in override.parts}
            overrides.append(replace(override, **changed))
        return replace(self, layers=tuple(overrides), **self._budget_parts(budget, prompt_tokens))

    def _budget_parts(self, budget: int | float, prompt_tokens: int | None) -> dict[str, Any]:
        """Return the part that changes with the budget, by name, leaving overrides aside."""
        if self.recall is not None:
            if prompt_tokens is None and not isinstance(budget, int):
                raise RecipeError(
                    f"a step recalls a number of tokens, not budget={budget!r} of a prompt of any "
                    "length; give a whole number, or with_budget the prompt_tokens"
                )
            tokens = Budget(1).resized(budget).resolve(prompt_tokens or 0)
            return {"recall": replace(self.recall, tokens=tokens)}
        if self.keep is None:
            return {}
        return {"keep": replace(self.keep, budget=self.keep.budget.resized(budget))}

    def budget_tokens(self, prompt_tokens: int) -> int:
        """Return the tokens a layer that keeps by age has at most: never less than is protected."""
        assert self.keep is not None
        return max(self.protect.tokens, self.keep.budget.resolve(prompt_tokens))

    # layers

    @property
    def _plain(self) -> list[Recipe]:
        """The recipe itself, and with each of its overrides alone."""
        return [self, *map(self._overridden, self.layers)]

    @property
    def keeps_by_score(self) -> list[Keep]:
        """All keeps of the layers that have scores."""
        return [x.keep for x in self._plain if x.keep is not None and not x.keep.by_age]

    def _overridden(self, override: LayerOverride) -> Recipe:
        try:
            return replace(self, layers=(), sliding="exact", **override.parts)
        except RecipeError as error:
            raise RecipeError(f"layers {override.where!r}: {error}") from error

    def for_layer(self, layer_index: int, layer_indices: Sequence[int]) -> Recipe:
        """Return the plain recipe of one layer: without `layers`, equal results being one object.

        layer_index: in the model; one of `layer_indices`, those of all layers that kvloom caches.
        The first `recall.full_layers` layers have no recall. Raises `RecipeError` for an
        override of a layer that does not exist.
        """
        parts: dict[str, Any] = {"recall": self.recall}
        for override in self.layers:
            if layer_index in select(override.where, layer_indices):
                parts |= override.parts
        recall = parts["recall"]
        if recall is not None and list(layer_indices).index(layer_index) < recall.full_layers:
            parts["recall"] = None
        try:
            plain = replace(self, layers=(), tuned=None, sliding="exact", **parts)
            return _interned(plain)
        except RecipeError as error:  # overrides that fit one by one, but not together
            raise RecipeError(f"layer {layer_index}: {error}") from error

    @property
    def packs_windows(self) -> bool:
        """Whether layers with a sliding window are packed."""
        return self.sliding == "packed"

    @property
    def in_windows(self) -> Recipe:
        """The plain recipe of packed windows: formats and the newest exact tokens alone.

        Blocks of `residual` tokens, a prompt's included, are those of the text without a window.
        """
        sides: dict[str, Any] = {
            side: replace(fmt, unit=None) for side, fmt in self.store.quantized.items()
        }
        protect = Protect(exact_recent=self.protect.exact_recent)
        return _interned(Recipe(store=replace(self.store, **sides), protect=protect))

    def expired(self, tokens: int, window: int, prompt: bool = False) -> int:
        """Return how many of the oldest tokens a packed window does not store.

        These are whole blocks that no later query sees. prompt: blocks before which a prompt need
        not be packed: where packing begins changes no block.
        """
        unit = self.store.block_tokens * -(-WINDOW_DROP // self.store.block_tokens)
        if prompt:
            unit = math.lcm(unit, *(fmt.packed_at_once for fmt in self.store.formats.values()))
        return max(0, tokens - (window - 1)) // unit * unit

    def budget_groups(self, layer_indices: Sequence[int]) -> list[BudgetGroup]:
        """Return the place of each of these layers among those that share its budget or score.

        A budget over layers is divided, and a shared score summed, among layers of equal `keep`;
        where heads of several layers compete (layers="joint"), of equal `keep` and `store`.
        """
        keys = [budget_key(self.for_layer(i, layer_indices)) for i in layer_indices]
        return [BudgetGroup(keys[:i].count(key), keys.count(key)) for i, key in enumerate(keys)]

    # a model

    def for_model(self, geometry: Geometry) -> Recipe:
        """Return the recipe as layers of a model follow it; it changes for latents and ALiBi alone.

        Latents have formats of their own (`Store.of_latents`). They have one key/value head, so
        heads do not compete for a budget. Neither latents nor ALiBi allow rotated queries: see
        `without_rotation`.
        """
        recipe = self.without_rotation if geometry.alibi or geometry.latent else self
        if not geometry.latent:
            return recipe
        keep, store = recipe.keep, recipe.store
        layers = tuple(replace(x, **_of_latents(x.parts)) for x in recipe.layers)
        return replace(recipe, layers=layers, **_of_latents({"keep": keep, "store": store}))

    @property
    def without_rotation(self) -> Recipe:
        """The recipe for models whose queries cannot be rotated to other positions.

        Scores that rotate queries are replaced, and no values are fitted: see
        `Keep.without_rotation`.
        """
        return self._with_keeps(lambda keep: keep.without_rotation)

    def within(self, positions: int) -> Recipe:
        """Return the recipe for a model with so many positions: see `Keep.within`."""
        return self._with_keeps(lambda keep: keep.within(positions))

    def _with_keeps(self, changed: Callable[[Keep], Keep]) -> Recipe:
        """Return the recipe with each keep changed, if one rotates queries."""
        if not self.rotates_queries:
            return self
        keep = None if self.keep is None else changed(self.keep)
        layers = (
            replace(x, keep=changed(x.keep)) if isinstance(x.keep, Keep) else x for x in self.layers
        )
        return replace(self, keep=keep, layers=tuple(layers))

    @property
    def rotates_queries(self) -> bool:
        """Whether a layer has a score that rotates queries, or fits values."""
        return any(x.keep is not None and x.keep.rotates_queries for x in self._plain)

    @property
    def repeats_prompt(self) -> bool:
        """Whether the model repeats a prompt, to score it."""
        return any(keep.scorer.repeats for keep in self.keeps_by_score)

    def problems(self, geometry: Geometry) -> list[str]:
        """Return everything in this recipe that does not fit the model, one sentence each."""
        return model_problems(self, geometry)

    def check(self, geometry: Geometry) -> None:
        """Raise `IncompatibleRecipe` with all problems, if there are any."""
        problems = self.problems(geometry)
        if problems:
            raise IncompatibleRecipe(self.name, problems)

    def nbytes(self, tokens: int, geometry: Geometry, batch: int = 1) -> int:
        """Return the bytes of layers of full attention after a prompt of `tokens` unpadded tokens.

        A budget that layers divide by their scores is counted as if it were uniform.
        """
        layer_indices, recipe = geometry.layer_indices, self.for_model(geometry)
        rows = (
            predicted_layer_nbytes(recipe.for_layer(i, layer_indices), tokens, geometry, *group)
            for i, group in zip(layer_indices, recipe.budget_groups(layer_indices), strict=True)
        )
        return sum(rows) * batch

    def sliding_nbytes(self, tokens: int, geometry: Geometry, batch: int = 1) -> int:
        """Return the bytes of the layers with a sliding window right after such a prompt."""
        return sum(self.window_nbytes(tokens, layer) for layer in geometry.sliding) * batch

    def window_nbytes(self, tokens: int, layer: SlidingLayer) -> int:
        """Return the bytes that one row has in one of these layers right after such a prompt."""
        if not self.packs_windows:
            return min(tokens, layer.window - 1) * layer.geometry.layer_token_nbytes()
        plain = self.in_windows
        before = plain.expired(tokens, layer.window, prompt=True)
        expired = plain.expired(tokens, layer.window) - before
        return predicted_token_nbytes(plain, tokens - before, layer.geometry, expired)

    # text

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested data, which `from_dict` and TOML take.

        Raises `RecipeError` for a part that is not registered, and so has no name.
        """
        data = text.to_dict(self)
        for name in ("layers", "compress_after"):
            if not data[name]:
                del data[name]
        if not self.packs_windows:
            del data["sliding"]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Build from `to_dict`'s data; raises `RecipeError` for what is not a recipe."""
        recipe: Recipe = text.from_dict(cls, data)
        return recipe

    def to_toml(self) -> str:
        """Return the recipe as a TOML document."""
        return text.to_toml(self.to_dict())

    @classmethod
    def from_toml(cls, source: str | Path) -> Recipe:
        """Build a recipe from TOML.

        Args:
            source: The document, or the path of a file with one (see `is_file`).

        Raises:
            RecipeError: The file cannot be read, or the document is not a recipe.
        """
        return text.read_toml(source, cls.from_dict)


def _of_latents(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a recipe for latents."""
    keep = parts.get("keep")
    changed = dict(parts)
    if "store" in parts:
        changed["store"] = parts["store"].of_latents
    if keep is not None and keep.budget.head_share is not None:
        layers = "uniform" if keep.budget.layers == "joint" else keep.budget.layers
        budget = replace(keep.budget, head_share=None, layers=layers)
        changed["keep"] = replace(keep.prompt_only, budget=budget)
    return changed


def budget_key(plain: Recipe) -> Hashable:
    """Return what the layers that divide one budget have in common: `keep`.

    With layers="joint", tokens move between these layers, so their `store` is equal, too.
    """
    joint = plain.keep is not None and plain.keep.budget.layers == "joint"
    return _typed_key(plain.keep), _typed_key(plain.store) if joint else None


_recipes: WeakValueDictionary[Hashable, Recipe] = WeakValueDictionary()


def _interned(recipe: Recipe) -> Recipe:
    """Return the one object for all recipes equal to this one: kernels are looked up by it."""
    return _recipes.setdefault(_typed_key(recipe), recipe)


def _typed_key(value: Any) -> Hashable:
    """Return a key that differs wherever the fields do: 1 == 1.0, but a budget tells them apart."""
    if is_dataclass(value):
        return type(value), *(_typed_key(getattr(value, field.name)) for field in fields(value))
    return tuple(map(_typed_key, value)) if isinstance(value, tuple) else (type(value), value)
