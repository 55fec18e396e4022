"""Bytes of a recipe's cache, and what a decode step reads and computes.

`CacheBytes.nbytes` is `Recipe.nbytes`, `Recipe.sliding_nbytes` and the bytes of states. It
evaluates each kind of layer once, because inverse questions try many contexts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from kvloom.recipe import BudgetGroup, Geometry, Recipe, SlidingLayer, predicted_layer_nbytes
from kvloom.store import grown_capacity

from .model import ModelFacts
from .units import Range

CHUNK = 256
"""The tokens of a small chunk of a prompt, at most."""


@dataclass(frozen=True)
class WindowKind:
    """Layers with equal sliding windows."""

    recipe: Recipe
    layer: SlidingLayer
    layers: int

    def nbytes(self, tokens: int) -> int:
        """Return the bytes of one layer and row after a prompt of `tokens` tokens."""
        return self.recipe.window_nbytes(tokens, self.layer)

    def prefill_nbytes(self, tokens: int) -> int:
        """Return the bytes of one layer and row in the step of a prompt."""
        if self.recipe.packs_windows:
            return self.nbytes(tokens)
        return tokens * self.layer.geometry.layer_token_nbytes()


@dataclass(frozen=True)
class LayerKind:
    """Layers that need equal bytes: their plain recipe, and their place in a shared budget."""

    recipe: Recipe
    group: BudgetGroup
    layers: int

    def nbytes(self, tokens: int, geometry: Geometry) -> int:
        """Return the bytes of one layer and row after a prompt of `tokens` tokens."""
        return predicted_layer_nbytes(self.recipe, tokens, geometry, *self.group)

    def grown_nbytes(self, tokens: int, geometry: Geometry) -> int:
        """Return the most bytes of one layer and row that reads `tokens` tokens in small chunks.

        A chunk is exact until it is packed or others are evicted, and buffers have spare room. A
        recipe that evicts from the prompt evicts from the first chunk, and keeps later tokens.
        """
        recipe = self.recipe
        if recipe.keep is not None and recipe.keep.when == "prompt":
            recipe = replace(recipe, keep=None)
        nbytes = replace(self, recipe=recipe).nbytes(tokens, geometry)
        formats = [fmt for fmt, _ in recipe.formats_and_recents]
        waiting = max(0 if fmt is None else fmt.packed_at_once for fmt in formats)
        exact = (CHUNK + waiting) * geometry.layer_token_nbytes()
        spare = sum(
            0 if fmt is None else fmt.nbytes(16 * fmt.packed_at_once, d, geometry.kv_heads)
            for fmt, d in zip(formats, geometry.dims, strict=True)
        )
        return grown_capacity(nbytes + exact, tight=False) + spare

    def read(self, tokens: int, geometry: Geometry) -> tuple[int, int]:
        """Return the bytes and the tokens of one layer and row that a decode step reads."""
        recipe = self.recipe
        if tokens <= recipe.compress_after:  # the queries that wait are not read
            return tokens * geometry.layer_token_nbytes(), tokens
        nbytes = self.nbytes(tokens, geometry)
        kept = self.kept_tokens(tokens)
        recall = recipe.recall
        if recall is None or kept <= recall.tokens:
            return nbytes, kept
        index = recall.index.nbytes(recall.index.due(0, kept), geometry.query_dim,
                                    geometry.dtype.itemsize) * geometry.kv_heads  # fmt: skip
        share = recall.share_read(recall.tokens, kept, geometry.latent)
        return index + round((nbytes - index) * share), recall.tokens

    def kept_tokens(self, tokens: int) -> int:
        """Return the tokens that a layer keeps of a prompt, once it evicts."""
        keep = self.recipe.keep
        if keep is None or not keep.drops(tokens):
            return tokens
        if keep.by_age:
            return min(tokens, self.recipe.budget_tokens(tokens))
        return min(tokens, keep.layer_tokens(tokens, self.group.size)[self.group.place])

    def prefill_nbytes(self, tokens: int, geometry: Geometry) -> int:
        """Return the bytes of one layer and row in the step of a prompt.

        Where the layers wait for each other's scores, or for a repetition, the prompt stays exact,
        with its scores and the queries to which values are fitted.
        """
        nbytes, keep = self.nbytes(tokens, geometry), self.recipe.keep
        if keep is None or not (keep.waits_for_layers or keep.scorer.repeats):
            return nbytes
        scores = 4 * tokens * geometry.kv_heads
        rows = 0 if keep.fit is None else keep.fit.rows(tokens)
        queries = rows * geometry.q_heads * geometry.query_dim * geometry.dtype.itemsize
        return max(nbytes, tokens * geometry.layer_token_nbytes()) + scores + queries

    def scoring_nbytes(self, tokens: int, geometry: Geometry) -> int:
        """Return about what one row takes to score a prompt by changed queries, and to fit values.

        The factors are measured. They stand for hidden states, then, of a chunk, for queries and
        logits, keys and values, in fp32, too.
        """
        keep = self.recipe.keep
        if keep is None or not (keep.scorer.needs_rope or keep.scorer.repeats):
            return 0
        queries = geometry.q_heads * geometry.query_dim * geometry.dtype.itemsize
        kv = geometry.layer_token_nbytes()
        at_once = min(tokens, getattr(keep.scorer, "chunk", tokens))
        scoring, fitting = 8 * queries + 3 * kv, 5 * queries + 7 * kv
        widest = scoring if keep.fit is None else max(scoring, fitting)
        return 2 * queries * tokens + widest * at_once


class CacheBytes:
    """The bytes of a recipe's cache on a model."""

    def __init__(self, recipe: Recipe, model: ModelFacts) -> None:
        recipe, layer_indices = recipe.for_model(model.geometry), model.geometry.layer_indices
        kinds: Counter[tuple[Recipe, BudgetGroup]] = Counter()
        self.compress_after = recipe.compress_after
        places = recipe.budget_groups(layer_indices)
        for layer_index, budget_group in zip(layer_indices, places, strict=True):
            plain = recipe.for_layer(layer_index, layer_indices)
            kinds[plain, budget_group if _unequal(plain) else BudgetGroup(0, 1)] += 1
        self.kinds = [LayerKind(*kind, layers) for kind, layers in kinds.items()]
        self.geometry = model.geometry
        sliding = model.geometry.sliding
        windows = Counter(
            replace(x, layer_index=0, geometry=replace(x.geometry, cached=None)) for x in sliding
        )
        self.windows = [WindowKind(recipe, *kind) for kind in windows.items()]
        self.states = Counter(model.states)
        self.state_nbytes = sum(model.states)

    @property
    def packing_period(self) -> int:
        """How many tokens later the cache may be smaller: packing a block of tokens frees bytes.

        A block that waits is up to 16 times as large as a packed one.
        """
        formats = (fmt for kind in self.kinds for fmt in kind.recipe.store.formats.values())
        return 16 * max((fmt.packed_at_once for fmt in formats), default=0)

    def nbytes(self, tokens: int, batch: int) -> int:
        """Return the bytes of all layers that hold a context of `tokens` tokens."""
        cached = sum(kind.layers * kind.nbytes(tokens, self.geometry) for kind in self.kinds)
        sliding = sum(kind.layers * kind.nbytes(tokens) for kind in self.windows)
        return batch * (cached + sliding + self.state_nbytes)

    def chunked_nbytes(self, tokens: int, batch: int) -> int:
        """Return the most bytes of all layers while a prompt is read in small chunks.

        The first `compress_after` tokens are all exact for a time, and a layer may have `limit`
        tokens. One layer at a time copies what it holds into larger buffers.
        """
        keeps = (kind.recipe.keep for kind in self.kinds)
        limits = [self.compress_after, *(keep.limit for keep in keeps if keep is not None)]
        ends = {tokens, *(min(tokens, limit) for limit in limits if limit)}
        return batch * max(map(self._grown_nbytes, ends))

    def _grown_nbytes(self, tokens: int) -> int:
        layers = [(kind.grown_nbytes(tokens, self.geometry), kind.layers) for kind in self.kinds]
        total = sum(nbytes * count for nbytes, count in layers) + self.state_nbytes
        for kind in self.windows:
            chunk = min(tokens, CHUNK) * kind.layer.geometry.layer_token_nbytes()
            total += kind.layers * (grown_capacity(kind.nbytes(tokens), tight=False) + chunk)
        return total + max((nbytes for nbytes, _ in layers), default=0)

    def prefill_nbytes(self, tokens: int, batch: int) -> int:
        """Return the largest number of bytes that all layers hold in the step of a prompt.

        A sliding layer of transformers holds the whole prompt until that step ends.
        """
        total = sum(kind.layers * kind.prefill_nbytes(tokens) for kind in self.windows)
        total += sum(x.layers * x.prefill_nbytes(tokens, self.geometry) for x in self.kinds)
        return batch * (total + self.state_nbytes)

    def scoring_nbytes(self, tokens: int, batch: int) -> int:
        """Return the most bytes that one layer takes to score a prompt."""
        layers = (kind.scoring_nbytes(tokens, self.geometry) for kind in self.kinds)
        return batch * max(layers, default=0)


def _unequal(recipe: Recipe) -> bool:
    """Return whether a budget gives the layers that share it different numbers of tokens."""
    if recipe.keep is None or recipe.keep.by_age:
        return False
    return recipe.keep.budget.layers not in ("uniform", "joint", "variance", "inverse-variance")


@dataclass(frozen=True)
class LayerWork:
    """What a decode step does in one kind of layers.

    kind: None for sliding windows and states, which are timed as exact layers. nbytes: read by one
    layer, whole batch; states are also written. flops: of one layer's attention, whole batch.
    """

    kind: LayerKind | None
    layers: int
    nbytes: int
    flops: int


@dataclass(frozen=True)
class StepWork:
    """What a decode step does: bytes of weights it reads, operations with them, and layers."""

    geometry: Geometry
    batch: int
    quantized: str | None
    weights: Range
    weight_flops: float
    layers: tuple[LayerWork, ...]

    @property
    def kv_nbytes(self) -> int:
        """Bytes of all layers' caches that the step reads."""
        return sum(layer.layers * layer.nbytes for layer in self.layers)

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of attention in all layers."""
        return sum(layer.layers * layer.flops for layer in self.layers)

    @property
    def layer_count(self) -> int:
        """The number of all layers."""
        return sum(layer.layers for layer in self.layers)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a decode step. The parts add up to the whole.

    weights: reading weights. kv: reading the cache. arithmetic: what computing takes beyond the
    time of reading. overhead: what Python and the launches of kernels take beyond all that.
    """

    weights: Range
    kv: Range
    arithmetic: Range
    overhead: Range

    @property
    def total(self) -> Range:
        """Seconds of the whole step."""
        return self.weights + self.kv + self.arithmetic + self.overhead

    @property
    def limit(self) -> str:
        """The part that takes longest."""
        parts = {
            "weights": self.weights,
            "KV reads": self.kv,
            "arithmetic": self.arithmetic,
            "overhead": self.overhead,
        }
        return max(parts, key=lambda name: parts[name].best)


def step_work(model: ModelFacts, cache: CacheBytes, context: int, batch: int) -> StepWork:
    """Return what a decode step does after `context` tokens in each of `batch` rows."""
    g, layers = model.geometry, []
    per_token = 2 * g.q_heads * (g.query_dim + g.dims[1])  # products with keys and with values
    for kind in cache.kinds:
        nbytes, tokens = kind.read(context, g)
        layers.append(LayerWork(kind, kind.layers, batch * nbytes, batch * tokens * per_token))
    for window in cache.windows:
        flops = batch * min(context, window.layer.window) * per_token
        layers.append(LayerWork(None, window.layers, batch * window.nbytes(context), flops))
    for nbytes, count in cache.states.items():
        layers.append(LayerWork(None, count, 2 * batch * nbytes, 0))
    weights = model.weights
    return StepWork(
        g,
        batch,
        weights.quantized,
        weights.read_nbytes(batch),
        weights.flops(batch),
        tuple(layers),
    )
