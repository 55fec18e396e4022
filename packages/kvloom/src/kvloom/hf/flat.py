"""The state of a cache's layers as JSON and named tensors, and back.

Decides how a tree of state becomes a file's metadata and tensors: a tensor is named by its path, as
`2.tokens.keys.packed.codes.live`. Also the state of transformers' own layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from ..errors import SavedCacheError

_TENSOR = "tensor"  # stands for the tensor of the same path
_SLIDING = ("keys", "values", "cumulative_length", "is_initialized", "record_past")


def flat(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a tree of state as JSON; its tensors go to `tensors`, in host memory."""
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu().contiguous()
        return _TENSOR
    if isinstance(tree, (list, tuple)):
        return [flat(x, f"{path}.{i}", tensors) for i, x in enumerate(tree)]
    if isinstance(tree, dict):
        return {name: flat(x, f"{path}.{name}", tensors) for name, x in tree.items()}
    if tree is None or isinstance(tree, int | float):
        return tree
    raise TypeError(f"{path}: {type(tree).__name__} is not state")


def nested(data: Any, path: str, tensor: Callable[[str], Tensor], device: torch.device) -> Any:
    """Return the tree that `flat` wrote as JSON; tensors are copied to the device, or to the host.

    tensor: returns a tensor by name; its memory may be a mapped file, which may change.
    """
    if data == _TENSOR:
        host = ".host." in path
        return tensor(path).to("cpu" if host else device, copy=True)
    if isinstance(data, list):
        return [nested(x, f"{path}.{i}", tensor, device) for i, x in enumerate(data)]
    if isinstance(data, dict):
        return {name: nested(x, f"{path}.{name}", tensor, device) for name, x in data.items()}
    return data


def stock_state(layer: Any) -> dict[str, Any]:
    """Return the state of a layer of transformers; raises `SavedCacheError` for other kinds.

    kvloom saves sliding windows alone.
    """
    if type(layer) is not DynamicSlidingWindowLayer:
        raise SavedCacheError(
            f"{type(layer).__name__}: kvloom cannot save layers of this kind; save caches of "
            "kvloom's own layers and transformers' sliding windows"
        )
    return {name: getattr(layer, name) for name in _SLIDING if name in vars(layer)}


def load_stock_state(layer: Any, saved: dict[str, Any]) -> None:
    """Load a state that `stock_state` returned into a new layer of transformers."""
    if saved["is_initialized"]:
        like = saved["keys"].new_empty(0)
        layer.lazy_initialization(like, like)
    for name, x in saved.items():
        setattr(layer, name, x)
