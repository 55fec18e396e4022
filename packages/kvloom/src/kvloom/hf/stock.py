"""Cache layers of transformers inside a kvloom cache: sliding windows, and layers with states.

A state is what linear attention, Mamba or a convolution carries from token to token. Decides which
attributes of a layer a failed step restores, a file holds and `nbytes` counts, and which tokens
`crop` can remove. Layers with states cannot change their batch themselves, so this module does it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from ..errors import CacheMisuse, SavedCacheError

_STATES = "conv_states", "recurrent_states"
_SAVED = (
    "keys", "values", "cumulative_length", "is_initialized", "record_past", *_STATES,
    "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state",
    "conv_kernel_size",
)  # fmt: skip
_SAVED_KINDS = (
    "DummyLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
)  # fmt: skip


def has_states(layer: Any) -> bool:
    """Return whether a layer has states, alone or beside keys and values."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def is_croppable(layer: Any) -> bool:
    """Return whether tokens can be taken back out of a layer."""
    return bool(getattr(layer, "is_croppable", not has_states(layer)))


def check_crop(layer: Any, tokens: int, seen: int) -> None:
    """Raise `CacheMisuse` if a layer that has seen `seen` tokens cannot remove the newest ones."""
    kind = type(layer).__name__
    if not is_croppable(layer):
        what = "recurrent state" if has_states(layer) else "image"
        raise CacheMisuse(
            f"crop cannot take tokens back out of the {what} of a {kind}; keep a copy.deepcopy of "
            "the cache instead"
        )
    recorded = _recorded(layer, seen)
    if tokens > recorded:
        raise CacheMisuse(
            f"crop cannot take {tokens} tokens back out of a {kind}, which recorded "
            f"{recorded} of them; call cache.activate_past_recording() before their steps, or keep "
            "a copy.deepcopy of the cache instead"
        )


def _recorded(layer: Any, seen: int) -> int:
    """Return how many tokens a layer holds beyond those that the next step needs."""
    stored = []  # tokens that are stored, and that are needed
    window = getattr(layer, "sliding_window", None)
    if window is not None and layer.is_initialized:
        stored.append((layer.keys.shape[-2], window - 1))
    if has_states(layer):
        sizes = zip(_each(layer.conv_states), _each(layer.conv_kernel_size), strict=True)
        stored += [(state.shape[-1], size) for state, size in sizes if state is not None]
    return min((held - needed for held, needed in stored if held < seen), default=seen)


def end_recording(layer: Any) -> None:
    """Have a layer record its past no more, and hold only what the next step needs."""
    if not getattr(layer, "record_past", False):
        return
    convolved = _each(layer.conv_states) if has_states(layer) else ()
    if getattr(layer, "is_initialized", True) and all(x is not None for x in convolved):
        layer.crop(0)
    layer.record_past = False


def change(layer: Any, method: str, argument: Any) -> None:
    """Call a method of a layer that changes its batch, or removes tokens."""
    changes_here = has_states(layer) and method.startswith("batch_")
    states = _state_tensors(layer) if changes_here else ()
    if states:
        rows = torch.arange(len(states[0]), device=states[0].device)
        repeats = method == "batch_repeat_interleave"
        rows = rows.repeat_interleave(argument) if repeats else rows[argument.to(rows.device)]
        LinearAttentionCacheLayerMixin.reorder_cache(layer, rows)
    if not changes_here or isinstance(layer, CacheLayerMixin):
        getattr(layer, method)(argument)


def recurrent_state(layer: Any) -> Tensor | None:
    """Return the only recurrent state of a layer; None before its first step."""
    return _each(layer.recurrent_states)[0] if any(_each(layer.has_previous_state)) else None


def set_recurrent_state(layer: Any, state: Tensor) -> None:
    """Set the only recurrent state of a layer."""
    layer.device, layer.dtype = state.device, state.dtype  # transformers 5.10 reads them
    layer.update_recurrent_state(state)
    layer.has_previous_state = _all(layer.has_previous_state, True)


def reset(layer: Any) -> None:
    """Remove all tokens from a layer."""
    layer.reset()
    if isinstance(layer, DynamicLayer):  # which transformers 5.10 fills with zeros
        layer.keys = layer.values = None
        layer.is_initialized = False
    if has_states(layer):  # which would keep their batch size
        for name in _STATES:
            initialized = f"is_{name}_initialized"
            setattr(layer, name, _all(getattr(layer, name), None))
            setattr(layer, initialized, _all(getattr(layer, initialized), False))
        layer.has_previous_state = _all(layer.has_previous_state, False)


def remember(layers: Sequence[Any]) -> Callable[[], None]:
    """Return a function that restores the present state of the layers."""
    attributes = [_copied_attributes(layer) for layer in layers]

    def restore() -> None:
        for layer, former in zip(layers, attributes, strict=True):
            vars(layer).clear()
            vars(layer).update(former)

    return restore


def _copied_attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer; copies what it changes in place."""

    def copied(x: Any) -> Any:
        return x.clone() if isinstance(x, Tensor) else x

    attributes = dict(vars(layer))
    for name, value in attributes.items():
        if isinstance(value, list):
            attributes[name] = [copied(x) for x in value]
        elif isinstance(value, dict):
            attributes[name] = {key: copied(x) for key, x in value.items()}
        elif name in _STATES:  # one tensor in transformers 5.10
            attributes[name] = copied(value)
    return attributes


def nbytes(layer: Any) -> int:
    """Return the bytes of a layer's keys, values, states and index."""
    tensors = [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
    # before `release`, keys and values are views of a whole prompt
    return sum(
        x.untyped_storage().nbytes()
        for x in (*tensors, *_state_tensors(layer))
        if isinstance(x, Tensor)
    )


def release(layers: Sequence[Any]) -> None:
    """Free the part of a prompt that sliding windows will not read, and of which they are views."""
    for layer in layers:
        for name in ("keys", "values"):
            x = getattr(layer, name, None)
            if isinstance(x, Tensor) and x.untyped_storage().nbytes() > x.nbytes:
                setattr(layer, name, x.clone())


def state_nbytes(layer: Any) -> int:
    """Return the bytes of a layer's states alone."""
    return sum(x.untyped_storage().nbytes() for x in _state_tensors(layer))


def state(layer: Any) -> dict[str, Any]:
    """Return what a file holds of a layer; raises `SavedCacheError` for unknown kinds."""
    if type(layer).__name__ not in _SAVED_KINDS:
        raise SavedCacheError(
            f"{type(layer).__name__}: kvloom cannot save layers of this kind; save caches of "
            "kvloom's own layers, sliding windows, and states of linear attention or convolutions"
        )
    attributes = {name: getattr(layer, name) for name in _SAVED if name in vars(layer)}
    return {name: _each(x) if isinstance(x, dict) else x for name, x in attributes.items()}


def load_state(layer: Any, saved: dict[str, Any]) -> None:
    """Load what `state` returned into a new layer."""
    if saved.get("keys") is not None:
        like = saved["keys"].new_empty(0)
        layer.lazy_initialization(like, like)
    for name, x in saved.items():
        setattr(layer, name, dict(enumerate(x)) if isinstance(x, list) else x)
    for x in _state_tensors(layer):
        layer.device, layer.dtype = x.device, x.dtype


def _state_tensors(layer: Any) -> list[Tensor]:
    """Return the states of a layer that are initialized."""
    states = (x for name in _STATES for x in _each(getattr(layer, name, None)))
    return [x for x in states if x is not None]


def _each(x: Any) -> list[Any]:
    """Return an attribute of each state: a dict, or one value in transformers 5.10."""
    return list(x.values()) if isinstance(x, dict) else [x]


def _all(former: Any, x: Any) -> Any:
    """Return an attribute of each state with one value for all."""
    return dict.fromkeys(former, x) if isinstance(former, dict) else x
