"""Which tokens of a prompt stay in continuous batching: those that kvloom's cache would keep.

Decides no rule: evictors do, of exact tokens. Needs a whole prompt in one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ...cache.checks import check_range
from ...cache.evictor import Phase
from ...cache.joint import decide
from ...cache.prompt_evictor import PromptEvictor
from ...cache.score_evictor import Decision
from ...cache.segment import Segment
from ...cache.step import KV, Queries
from ...recipe import Recipe
from ...recipe.spec import budget_key
from ...store import LayerFacts, Store

Heads = list[KV]
"""Keys and values [tokens, D] of each key/value head."""


class PromptEviction:
    """Chooses the tokens of prompts that stay.

    recipe: one that `kvloom.paged.paged` returned. layer_indices, facts: of the layers.
    """

    def __init__(
        self, recipe: Recipe, layer_indices: Sequence[int], facts: Sequence[LayerFacts]
    ) -> None:
        self.names = [f"layer {i}" for i in layer_indices]
        self.plain = [recipe.for_layer(i, layer_indices) for i in layer_indices]
        self.exact = [replace(plain, store=Store()) for plain in self.plain]
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

    def norms(self, layer_index: int) -> Tensor | None:
        """Return the norms of a layer's input in the running step, fp32 [1, T], if noted."""
        found = self.by_index.get(layer_index)
        return None if found is None else found.norms

    def begin(self) -> PromptChoice:
        """Return the choice of one prompt."""
        evictors = {
            place: PromptEvictor(exact, place, group, None, facts.rope, facts.head)
            for place, (exact, group, facts) in enumerate(
                zip(self.exact, self.groups, self.facts, strict=True)
            )
            if exact.keep is not None
        }
        return PromptChoice(self.names, evictors, self.joint)


@dataclass
class LayerInput:
    """The norms of a layer's input, which `forward.input_norms` notes."""

    uses_input_norms: bool = True
    norms: Tensor | None = None


class PromptChoice:
    """The tokens of one prompt that stay.

    names: of layers, in errors. evictors: of those that evict. joint: the layers that each layer
    decides with.
    """

    def __init__(
        self, names: list[str], evictors: dict[int, PromptEvictor], joint: list[list[int]]
    ) -> None:
        self.names, self.evictors, self.joint = names, evictors, joint
        self.waiting: dict[int, KV] = {}

    def read(
        self, place: int, queries: Queries, k: Tensor, v: Tensor
    ) -> Iterator[tuple[int, Heads]]:
        """Score the prompt k, v [1, H, N, D] of a layer, and yield the layers that are decided.

        Raises `NotFinite`.
        """
        check_range(self.names[place], Store(), (torch.inf, torch.inf), k, v)
        evictor = self.evictors.get(place)
        if evictor is None:
            yield place, list(zip(k[0], v[0], strict=True))
            return
        evictor.set_budget(k.shape[2])
        decision = evictor.score(Segment(), queries, (k, v))
        assert decision is not None
        if not evictor.waits_for_layers:
            yield place, _evict(self.evictors.pop(place), decision)
            return
        evictor.wait(Phase.DECIDING, decision.queries, decision.scores)
        self.waiting[place] = k, v
        layers = self.joint[place]
        if place == layers[-1]:
            waiting = [self.evictors.pop(i) for i in layers]
            for i, one, joint in zip(layers, waiting, decide(waiting), strict=True):
                made = Decision(one.end_wait(), *joint, new=self.waiting.pop(i))
                yield i, _evict(one, made)


def _evict(evictor: PromptEvictor, decision: Decision) -> Heads:
    """Return the keys and values of each head that stay."""
    segment = evictor.evict(Segment(), decision, None, False)
    assert isinstance(segment, Segment)
    heads = list(zip(segment.exact_keys()[0], segment.exact_values()[0], strict=True))
    ragged = evictor.ragged
    if ragged is None or ragged.spans is None:
        return heads
    counts = ragged.spans.bounds[0, :, 1].tolist()
    k, v = (side.tail.view()[0, 0].split(counts) for side in (ragged.keys, ragged.values))
    return [
        (torch.cat([own_k, more_k]), torch.cat([own_v, more_v]))
        for (own_k, own_v), more_k, more_v in zip(heads, k, v, strict=True)
    ]
