"""The state of a layer as plain data and tensors, which `Cache.save` writes.

Decides what of a layer is state; each part returns its own. Everything else follows from the recipe
and the model. A state is a tree of dicts and lists of tensors, numbers, strings and None. Tensors
below a key named "host" stay in host memory.
"""

from __future__ import annotations

from typing import Any

from .draft import Draft
from .layer_state import LayerState
from .slots import Slots
from .trace import Trace

VERSION = 5
"""The version of the tree. Raise it when a key is added, removed or changes its meaning."""


def state(layer: LayerState) -> dict[str, Any]:
    """Return the state of a layer: views of its tensors, without spare room."""
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


def load_state(layer: LayerState, saved: dict[str, Any]) -> None:
    """Load a state that `state` returned into an empty layer of the same recipe and model.

    The layer owns the tensors then, and continues exactly as the saved one.
    """
    like = layer.like = saved["like"]
    layer.seen, layer.read = saved["seen"], saved["read"]
    layer.recording, layer.settled = saved["recording"], saved["settled"]
    if saved["observed"] and layer.trace is None:
        layer.trace = Trace()
    if saved["slots"]:
        layer.tokens = Slots.from_state(saved["tokens"])
    else:
        layer.segment.load_state(saved["tokens"], like)
    if layer.sinks is not None:
        layer.sinks.load_state(saved["sinks"])
    if layer.evictor is not None:
        layer.evictor.load_state(saved["evictor"], like)
    if layer.retriever is not None:
        layer.retriever.load_state(saved["retriever"])
    if saved["draft"] is not None:
        layer.draft = Draft.from_state(saved["draft"])
    if layer.outliers is not None:
        layer.outliers.load_state(saved["outliers"], like)
