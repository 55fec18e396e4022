"""Build the layers of a cache from a recipe."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..positions.rope import Rope
from ..recipe.spec import Recipe, budget_key
from ..store import LayerFacts
from .layer import LayerCache
from .layer_state import LayerState


def build_layers(
    recipe: Recipe,
    layer_indices: Sequence[int],
    facts: Sequence[LayerFacts],
    ropes: Sequence[Rope | None] | None = None,
) -> list[LayerCache]:
    """Return one empty `LayerCache` per layer; layers that decide together know each other.

    layer_indices: the indices of these layers in the model. facts, ropes: one for each of them. A
    rope rotates keys where the recipe renumbers positions; None: no layer rotates them.
    """
    layers, budget_groups = [], recipe.budget_groups(layer_indices)
    for place, layer_index in enumerate(layer_indices):
        plain = recipe.for_layer(layer_index, layer_indices)
        renumbers = plain.keep is not None and plain.keep.renumbers
        rope = ropes[place] if ropes is not None and renumbers else None
        layers.append(
            LayerCache(
                plain, f"layer {layer_index}", place, rope=rope, facts=facts[place],
                budget_group=budget_groups[place],
            )
        )  # fmt: skip
    coordinate(layers)
    return layers


def coordinate(layers: Sequence[LayerCache]) -> None:
    """Make layers known to each other that divide one budget and need each other's scores."""
    by_budget: dict[Hashable, list[LayerState]] = {}
    for layer in layers:
        state = layer._state
        if state.evictor is not None and state.evictor.waits_for_layers:
            by_budget.setdefault(budget_key(state.recipe), []).append(state)
    for joint_layers in by_budget.values():
        for state in joint_layers:
            state.joint_layers = joint_layers
