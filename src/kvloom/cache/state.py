"""The state of a layer as plain data and tensors: what saving a cache writes.

Decides what of a layer is state: what its parts say. Everything else follows from the recipe and
the model. A state is a tree of dicts and lists of tensors, numbers, strings and None. Tensors below
a key named "host" stay in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .draft import Draft
from .slots import Slots

if TYPE_CHECKING:
    from .layer import LayerCache

VERSION = 3
"""Of the tree. Raise it when a key is added, removed or changes its meaning."""


def state(layer: LayerCache) -> dict[str, Any]:
    """Return the state of a layer, without spare room: views of the tensors held."""
    parts = {"sinks": layer.sinks, "evictor": layer.evictor, "retriever": layer.retriever,
             "outliers": layer.outliers, "draft": layer.draft}  # fmt: skip
    return {
        "like": layer.like,
        "seen": layer.seen,
        "read": layer.read,
        "recording": layer.recording,
        "settled": layer.settled,
        "observed": layer.trace is not None,
        "slots": isinstance(layer.tokens, Slots),
        "tokens": layer.tokens.state(),
        **{name: None if part is None else part.state() for name, part in parts.items()},
    }


def load_state(layer: LayerCache, saved: dict[str, Any]) -> None:
    """Give an empty layer of the same recipe and model a state of `state`; tensors become its own.

    The layer continues exactly as the saved one.
    """
    like = layer.like = saved["like"]
    layer.seen, layer.read = saved["seen"], saved["read"]
    layer.recording, layer.settled = saved["recording"], saved["settled"]
    if saved["observed"]:
        layer.observe()
    if saved["slots"]:
        layer.tokens = Slots.from_state(saved["tokens"])
    else:
        layer.segment.load_state(saved["tokens"], like)
    if layer.sinks is not None:
        layer.sinks.load_state(saved["sinks"])
    if layer.evictor is not None:
        layer.evictor.load_state(saved["evictor"])
    if layer.retriever is not None:
        layer.retriever.load_state(saved["retriever"])
    if saved["draft"] is not None:
        layer.draft = Draft.from_state(saved["draft"])
    if layer.outliers is not None:
        layer.outliers.load_state(saved["outliers"], like)
