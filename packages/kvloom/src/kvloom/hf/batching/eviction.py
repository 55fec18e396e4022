"""Eviction from prompts in continuous batching: which tokens stay, as kvloom's cache chooses them.

Decides how many tokens of a prompt stay, and which. It needs the whole prompt in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ...cache.build import build_layers
from ...cache.step import KV, Queries, StepInputs
from ...recipe import Recipe
from ...store import LayerFacts, Store


class PromptEviction:
    """Chooses the tokens of a prompt that stay.

    recipe: one that `kvloom.paged.paged` returned, and that evicts in every layer. layer_indices,
    facts: of the layers.
    """

    def __init__(
        self, recipe: Recipe, layer_indices: Sequence[int], facts: Sequence[LayerFacts]
    ) -> None:
        assert recipe.keep is not None
        self.keep, exact = recipe.keep, Store()
        overrides = tuple(replace(override, store=exact) for override in recipe.layers)
        unpacked = replace(recipe, store=exact, layers=overrides)
        self.layers = build_layers(unpacked, layer_indices, facts)

    def kept(self, tokens: int) -> int:
        """Return how many tokens of a prompt stay."""
        return min(tokens, *self.keep.layer_tokens(tokens, 1))

    def choose(self, place: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> KV:
        """Return the keys and values [1, H, M, D] that stay in a layer, of a prompt k, v.

        place: of the layer among the others. q: [1, Hq, N, D]. scale: of the logits.
        """
        layer = self.layers[place]
        layer.reset()  # a step may have failed
        layer.prefill(StepInputs(Queries(q, scale), k, v))
        k, v, _ = layer.exact_tokens()
        layer.reset()
        return k, v
