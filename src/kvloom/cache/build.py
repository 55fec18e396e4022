"""The layers of a cache, made from a recipe."""

from __future__ import annotations

from collections.abc import Sequence

from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import LayerMetadata
from .commit import evict
from .coordinator import Coordinator
from .layer import LayerCache
from .score_evictor import ScoreEvictor


def build_layers(
    recipe: Recipe,
    names: Sequence[str],
    metadata: Sequence[LayerMetadata],
    rope: Rope | None = None,
) -> list[LayerCache]:
    """Return one empty `LayerCache` per name; those that decide together share a coordinator."""
    count = len(names)
    layers = [
        LayerCache(recipe, name, (i, count), rope, metadata[i]) for i, name in enumerate(names)
    ]
    coordinate(layers)
    return layers


def coordinate(layers: Sequence[LayerCache]) -> None:
    """Let the layers that need each other's scores decide together, first to last."""
    waiting = [
        layer for layer in layers if isinstance(layer.evictor, ScoreEvictor) and layer.evictor.waits
    ]
    if waiting:
        coordinator = Coordinator(waiting[0].score_evictor.keep.shared, evict)
        coordinator.layers = waiting
        for layer in waiting:
            layer.coordinator = coordinator
