"""The state of a layer as plain data and tensors, which `Cache.save` writes.

Decides what of a layer is state; each part returns its own. Everything else follows from the recipe
and the model. A state is a tree of dicts and lists of tensors, numbers, strings and None. Tensors
below a key named "host" stay in host memory.
"""

from __future__ import annotations

from typing import Any

from .layer_state import LayerState
from .slot_storage import SlotStorage
from .trace import Trace
from .uncommitted import Uncommitted

VERSION = 5
"""The version of the tree. Raise it when a key is added, removed or changes its meaning."""


def save_layer(state: LayerState) -> dict[str, Any]:
    """Return the state of a layer: views of its tensors, without spare room."""
    parts = {"sinks": state.sinks, "evictor": state.evictor, "retriever": state.retriever,
             "outliers": state.outliers, "draft": state.uncommitted}  # fmt: skip
    return {
        "like": state.like,
        "seen": state.seen,
        "read": state.read,
        "recording": state.recording,
        "settled": state.prompt_done,
        "observed": state.trace is not None,
        "slots": isinstance(state.storage, SlotStorage),
        "tokens": state.storage.state(),
        **{name: None if part is None else part.state() for name, part in parts.items()},
    }


def load_layer(state: LayerState, saved: dict[str, Any]) -> None:
    """Load a state that `save_layer` returned into an empty layer of the same recipe and model.

    The layer owns the tensors then, and continues exactly as the saved one.
    """
    like = state.like = saved["like"]
    state.seen, state.read = saved["seen"], saved["read"]
    state.recording, state.prompt_done = saved["recording"], saved["settled"]
    if saved["observed"] and state.trace is None:
        state.trace = Trace()
    if saved["slots"]:
        state.storage = SlotStorage.from_state(saved["tokens"], state.seen)
    else:
        state.segment.load_state(saved["tokens"], like)
    if state.sinks is not None:
        state.sinks.load_state(saved["sinks"])
    if state.evictor is not None:
        state.evictor.load_state(saved["evictor"], like)
    if state.retriever is not None:
        state.retriever.load_state(saved["retriever"])
    if saved["draft"] is not None:
        state.uncommitted = Uncommitted.from_state(saved["draft"])
    if state.outliers is not None:
        state.outliers.load_state(saved["outliers"], like)
