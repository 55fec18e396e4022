"""Build the layers of a cache from a recipe."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from ..positions.rope import Rope
from ..recipe.layers import budget_group
from ..recipe.spec import Recipe
from ..store import LayerMetadata
from .commit import evict
from .coordinator import Coordinator
from .layer import LayerCache
from .layer_parts import LayerParts


def build_layers(
    recipe: Recipe,
    numbers: Sequence[int],
    metadata: Sequence[LayerMetadata],
    rope: Rope | None = None,
) -> list[LayerCache]:
    """Return one empty `LayerCache` per layer; layers that decide together share a coordinator.

    numbers: the model's numbers of these layers. metadata: of each of them. rope: rotates keys in
    layers whose recipe renumbers positions.
    """
    layers = []
    for rank, (number, share) in enumerate(zip(numbers, recipe.sharing(numbers), strict=True)):
        plain = recipe.for_layer(number, numbers)
        renumbers = plain.keep is not None and plain.keep.positions != "original"
        layers.append(
            LayerCache(
                plain, f"layer {number}", rank, len(numbers), rope if renumbers else None,
                metadata[rank], share,
            )
        )  # fmt: skip
    coordinate(layers)
    return layers


def coordinate(layers: Sequence[LayerCache]) -> None:
    """Give one coordinator to layers that divide one budget and need each other's scores."""
    groups: dict[Hashable, list[LayerParts]] = {}
    for layer in layers:
        parts = layer.parts
        if parts.evictor is not None and parts.evictor.waits:
            groups.setdefault(budget_group(parts.recipe), []).append(parts)
    for together in groups.values():
        keep = together[0].recipe.keep
        coordinator = Coordinator(together, keep is not None and keep.shared, evict)
        for parts in together:
            parts.coordinator = coordinator
