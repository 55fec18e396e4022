"""What tests read inside a cache: the only place in the tests that knows where a layer has it.

`layers` gives the layers of a model's cache, `observe` turns on their record of decisions. The
other functions take a `LayerCache`.
"""

from __future__ import annotations

import torch
from torch import Tensor

import kvloom
from kvloom.cache.evictor import Evictor
from kvloom.cache.layer import LayerCache
from kvloom.cache.ragged import RaggedTokens
from kvloom.cache.retriever import Retriever
from kvloom.cache.segment import Segment
from kvloom.cache.sinks import Sinks
from kvloom.cache.slot_storage import SlotStorage, Storage
from kvloom.cache.step import Trace
from kvloom.recall.offload import OffloadStore
from kvloom.store.kv_side import KVSide


def layers(cache: kvloom.Cache) -> list[LayerCache]:
    """The compressed layers of a model's cache."""
    return [routed.cache for routed in cache.full_layers]


def observe(cache: kvloom.Cache) -> None:
    """Have every layer record which tokens it keeps."""
    for layer in layers(cache):
        layer.observe()


def record(layer: LayerCache, on: bool) -> None:
    """Whether a crop may remove the tokens of each later step, as in assisted decoding."""
    layer._state.recording = on


# --- tokens --------------------------------------------------------------------------------------


def tokens(layer: LayerCache) -> Storage:
    """The stored tokens, without sinks that an eviction by age keeps apart."""
    return layer._state.storage


def count(layer: LayerCache) -> int:
    """The number of tokens that `tokens` holds of each row and head."""
    return len(layer._state.storage)


def in_slots(layer: LayerCache) -> bool:
    """Whether tokens are replaced one by one."""
    return isinstance(layer._state.storage, SlotStorage)


def keys(layer: LayerCache) -> KVSide:
    """The keys: a packed prefix and an exact tail."""
    return layer._state.segment.keys


def oldest_keys(layer: LayerCache, n: int) -> Tensor:
    """The keys of the n oldest tokens that are not offloaded, unpacked: [B, Hk, n, D]."""
    segment = layer._state.segment
    return segment.unpacked_keys(segment.offloaded, segment.offloaded + n)


def values(layer: LayerCache) -> KVSide:
    """The values: a packed prefix and an exact tail."""
    return layer._state.segment.values


def kept(layer: LayerCache) -> Tensor:
    """The logical indices of all stored tokens in ascending order, int64 [B, Hk, N]."""
    return layer.logical().sort(dim=-1).values


def dropped(layer: LayerCache) -> float:
    """The number of tokens seen and not stored, of each row and head, or on average."""
    return layer._state.dropped


def shape(layer: LayerCache) -> torch.Size:
    """The shape of an empty tensor of keys, [B, Hk, 0, D]."""
    return layer._state.like.shape


# --- the optional parts of a layer ---------------------------------------------------------------


def sinks(layer: LayerCache) -> Sinks | None:
    """The first tokens, where they are stored apart."""
    return layer._state.sinks


def evictor(layer: LayerCache) -> Evictor:
    """What decides which tokens stay."""
    return layer._state.evictor


def ragged(layer: LayerCache) -> RaggedTokens:
    """The tokens that heads keep in different numbers."""
    return layer._state.evictor.ragged


def outliers(layer: LayerCache) -> Segment:
    """The exact copies of marked tokens."""
    return layer._state.outliers.tokens


def retriever(layer: LayerCache) -> Retriever:
    """What finds the tokens that a step reads."""
    return layer._state.retriever


def indexed(layer: LayerCache) -> int:
    """The number of tokens in the retriever's index."""
    return layer._state.retriever.finder.tokens


def tier(layer: LayerCache) -> OffloadStore:
    """The tokens in host memory or in a file."""
    return layer._state.retriever.store


# --- the last step -------------------------------------------------------------------------------


def read(layer: LayerCache) -> float:
    """The number of tokens that the last step read, of each row and head, on average."""
    return layer._state.tokens_read


def trace(layer: LayerCache) -> Trace | None:
    """The decisions of the last step; None: the layer is not observed."""
    return layer._state.trace


def recalled(layer: LayerCache) -> Tensor | None:
    """The slots that the retriever chose in the last step, int64 [B, H, M]; None: it read all."""
    return layer._state.trace.recalled


def scored(layer: LayerCache) -> tuple[Tensor, Tensor]:
    """The indices and scores [B, Hk, N] of the tokens that the last step could evict."""
    return layer._state.trace.scored
