"""What a decode step reads and computes, and how long its parts take."""

from __future__ import annotations

from dataclasses import dataclass

from kvloom.recipe import Geometry

from .cache_bytes import CacheBytes, LayerKind
from .model import ModelFacts
from .ranges import Range


@dataclass(frozen=True)
class LayerWork:
    """What a decode step does in one kind of layers.

    kind: None for layers with a sliding window, which transformers caches. nbytes: read by one
    layer, whole batch. flops: of one layer's attention, whole batch.
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
    per_token = 4 * g.q_heads * g.head_dim  # a product with keys, and one with values
    for kind in cache.kinds:
        nbytes, tokens = kind.read(context, g)
        layers.append(LayerWork(kind, kind.layers, batch * nbytes, batch * tokens * per_token))
    for window, count in cache.windows.items():
        tokens = min(context, window)
        layers.append(
            LayerWork(None, count, batch * tokens * cache.exact, batch * tokens * per_token)
        )
    weights = model.weights
    return StepWork(
        g,
        batch,
        weights.quantized,
        weights.read_nbytes(batch),
        weights.flops(batch),
        tuple(layers),
    )
