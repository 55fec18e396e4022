"""Which tokens of a prompt stay in continuous batching: those that kvloom's cache would keep.

Decides no rule: evictors do, of exact tokens. Values are fitted to keys as pages store them. The
chunks of a prompt wait, exact, until the last of them has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...cache.checks import check_range
from ...cache.joint import decide
from ...cache.prompt_evictor import PromptEvictor
from ...cache.score_evictor import Decision
from ...cache.segment import Segment
from ...cache.step import KV, Queries
from ...keep import Fit
from ...keep.query_predictor import QueryPredictor
from ...recipe import Recipe
from ...recipe.spec import budget_key
from ...store import KVSide, LayerFacts, Store
from ...store.calibration import of_heads

Heads = list[KV]
"""Keys and values [tokens, D] of each key/value head."""


class PromptEviction:
    """Chooses the tokens of prompts that stay.

    recipe: one that `kvloom.paged.packed_by_page` returned. layer_indices, facts: of the layers.
    """

    def __init__(
        self, recipe: Recipe, layer_indices: Sequence[int], facts: Sequence[LayerFacts]
    ) -> None:
        self.names = [f"layer {i}" for i in layer_indices]
        self.plain = [recipe.for_layer(i, layer_indices) for i in layer_indices]
        self.exact = [_without_fit(replace(plain, store=Store())) for plain in self.plain]
        self.groups, self.facts = recipe.budget_groups(layer_indices), facts
        self.evicts = any(plain.keep is not None for plain in self.plain)
        self.by_index = {
            layer_index: LayerInput()
            for layer_index, plain in zip(layer_indices, self.plain, strict=True)
            if plain.uses_input_norms
        }
        keys = [budget_key(plain) for plain in self.plain]
        self.joint = [[i for i, key in enumerate(keys) if key == own] for own in keys]
        self.most_pages = lru_cache(1 << 12)(self._most_pages)  # asked for all requests that wait

    def _most_pages(self, prompt: int, later: int, heads: int, page: int) -> int:
        """Return the most pages of a request, for the prompt's tokens that stay and later ones.

        heads: in a layer. page: tokens of a head's page.
        """
        pages = divided = 0
        for plain, (index, size) in zip(self.plain, self.groups, strict=True):
            keep, tokens = plain.keep, prompt
            if keep is not None:
                tokens = min(prompt, keep.layer_tokens(prompt, size)[index])
            if keep is not None and keep.needs_all_heads:  # scores decide who gets them
                divided += heads * (tokens + later)
            else:
                pages += heads * ((tokens + later) // page)
        return pages + divided // page

    def fit(self, place: int) -> Fit | None:
        """Return how a layer's values are fitted; None: they stay as they are."""
        keep = self.plain[place].keep
        return None if keep is None else keep.fit

    def norms(self, layer_index: int) -> Tensor | None:
        """Return the norms of a layer's input in the running step, fp32 [1, T], if noted."""
        found = self.by_index.get(layer_index)
        return None if found is None else found.norms

    def begin(self, tokens: int) -> PromptChoice:
        """Return the choice of one prompt of so many tokens."""
        evictors = {
            place: PromptEvictor(exact, place, group, None, facts.rope, facts.head)
            for place, (exact, group, facts) in enumerate(
                zip(self.exact, self.groups, self.facts, strict=True)
            )
            if exact.keep is not None
        }
        return PromptChoice(self, evictors, tokens)


@dataclass
class LayerInput:
    """The norms of a layer's input, which `forward.input_norms` notes."""

    uses_input_norms: bool = True
    norms: Tensor | None = None


class PromptChoice:
    """The tokens of one prompt that stay.

    evictors: of the layers that evict. tokens: of the prompt. ids: of its first chunks, int64
    [1, T] each, until layers learn from them. predictors: what layers have learned.
    """

    def __init__(
        self, eviction: PromptEviction, evictors: dict[int, PromptEvictor], tokens: int
    ) -> None:
        self.eviction, self.evictors, self.tokens = eviction, evictors, tokens
        self.earlier: dict[int, tuple[Queries, Tensor, Tensor]] = {}  # chunks, by layer
        self.waiting: dict[int, KV] = {}
        self.ids: list[Tensor] = []
        self.predictors: dict[int, QueryPredictor] = {}
        self.fit_queries: dict[int, Queries] = {}  # those that fit values

    def joined(
        self, place: int, queries: Queries, k: Tensor, v: Tensor
    ) -> tuple[Queries, Tensor, Tensor]:
        """Return the prompt of a layer up to a chunk k, v [1, H, T, D], for attention and `read`.

        Raises `NotFinite`.
        """
        check_range(self.eviction.names[place], Store(), (torch.inf, torch.inf), k, v)
        if k.shape[2] == self.tokens:
            return queries, k, v
        nothing = queries.slice(0, 0), k[:, :, :0], v[:, :, :0]
        before, old_k, old_v = self.earlier.pop(place, nothing)
        queries, k, v = (
            queries.after(before), torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2),
        )  # fmt: skip
        if k.shape[2] < self.tokens:
            self.earlier[place] = queries, k, v
        return queries, k, v

    def read(
        self, place: int, queries: Queries, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Heads]]:
        """Score the prompt k, v [1, H, N, D] of a layer, and yield the layers that are decided.

        None is decided before the last chunk.
        """
        if k.shape[2] < self.tokens:
            return
        evictor = self.evictors.get(place)
        if evictor is None:
            yield place, list(zip(k[0], v[0], strict=True))
            return
        if place in self.predictors:
            queries = queries._replace(predictor=self.predictors.pop(place))
            queries = evictor.as_repeated(queries, k)
        fit = self.eviction.fit(place)
        if fit is not None:
            self.fit_queries[place] = queries.for_fit(fit)
        evictor.set_budget(k.shape[2])
        decision = evictor.score(Segment(), queries, (k, v))
        assert decision is not None
        if not evictor.waits_for_layers:
            yield place, self._evict(place, decision)
            return
        evictor.vote(decision)
        self.waiting[place] = k, v
        layers = self.eviction.joint[place]
        if place == layers[-1]:
            decisions = decide([self.evictors[i] for i in layers])
            for i, joint in zip(layers, decisions, strict=True):
                yield i, self._evict(i, joint._replace(new=self.waiting.pop(i)))

    def _evict(self, place: int, decision: Decision) -> Heads:
        """Return the keys and values of each head that stay in a layer, once it has decided."""
        evictor = self.evictors.pop(place)
        assert decision.new is not None
        k, v = decision.new
        equal, choice = evictor.decided(Segment(), decision, k.shape[2])
        if equal is None:  # all tokens stay
            return list(zip(k[0], v[0], strict=True))
        slots = list(equal[0])
        if choice is not None and choice.contested is not None:
            contested = [won.nonzero()[:, 0] for won in choice.contested[0]]
            slots = [torch.cat(pair) for pair in zip(slots, contested, strict=True)]
        if (fit := self.eviction.fit(place)) is not None:
            index = torch.arange(k.shape[2])
            step = self.fit_queries.pop(place), k, v, None, index.expand(1, 1, -1), len(index), None
            v = fit(evictor.scorer.step(*step), *self._stored(place, k, slots))
        return [(k[0, head, kept], v[0, head, kept]) for head, kept in enumerate(slots)]

    def _stored(self, place: int, k: Tensor, slots: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return which tokens stay, bool [1, H, N], and k with theirs as pages store them.

        slots: int64, of each head's tokens that stay.
        """
        fmt, calibrated = self.eviction.plain[place].store.keys, self.eviction.facts[place].keys
        keys, stays = k.clone(), torch.zeros(k.shape[:3], dtype=torch.bool)
        for head, kept in enumerate(slots):
            side = KVSide(fmt, calibrated=calibrated and of_heads(calibrated, "keys", head, 1))
            keys[0, head, kept] = side.as_stored(k[:, head : head + 1, kept])[0, 0]
            stays[0, head, kept] = True
        return stays, keys


def _without_fit(recipe: Recipe) -> Recipe:
    """Return a plain recipe whose evictor fits no values: it would fit them to exact keys."""
    keep = recipe.keep
    return recipe if keep is None else replace(recipe, keep=replace(keep, fit=None))
