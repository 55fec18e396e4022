"""Models whose attention bypasses transformers' attention interface.

Decides which modules get another forward, and when it runs: only in a step with a kvloom cache.
With any other cache, or none, the model's own code runs with the model's own masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ..cache.step import Queries, StepInputs
from ..positions.alibi import Alibi
from . import attention, compat
from .adapter_registry import ADAPTERS, Adapter, register
from .routed import RoutedCache, RoutedLayer

__all__ = ["attend", "install", "masks", "register", "uninstall", "visible_mask"]

_MASKS = "kvloom-adapted"  # the masks of a step with a kvloom cache
_OWN = "_kvloom_own_forward"


def install(model: PreTrainedModel) -> None:
    """Route every attention module of an adapted model."""
    adapter = _adapter(model)
    for module in _attentions(model):
        name = _name(module)
        setattr(module, _OWN, getattr(module, name))
        setattr(module, name, partial(_forward, adapter.attend, module))


def uninstall(model: PreTrainedModel) -> None:
    """Restore the forward of every attention module."""
    for module in _attentions(model):
        if _OWN in vars(module):
            name, own = _name(module), getattr(module, _OWN)
            delattr(module, _OWN)
            delattr(module, name)
            if (
                getattr(module, name, None) != own
            ):  # not its class's: it was replaced before `install`
                setattr(module, name, own)


def attend(
    layer: RoutedLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    alibi: Alibi | None = None,
) -> Tensor:
    """Attend q [B, Hq, T, D] to all stored tokens of the layer and to k, v [B, Hk, T, D].

    mask: as `_mask` makes it. Returns [B, T, Hq * D]. Raises `CacheMisuse` for other masks.
    """
    attention.check_mask(layer, mask)
    k, v = layer.update(k, v)
    visible = visible_mask(mask)
    visible = None if visible is None else visible[:, None]
    out = layer.attend(StepInputs(Queries(q, scale, visible, alibi=alibi), k, v))
    return out.transpose(1, 2).flatten(2)


def visible_mask(mask: Tensor) -> Tensor | None:
    """Return the mask of visible tokens that `_mask` made; None without padding."""
    return mask if mask.numel() else None


def _adapter(model: PreTrainedModel) -> Adapter:
    return ADAPTERS[compat.decoder_config(model).model_type]()


def _attentions(model: PreTrainedModel) -> list[Any]:
    kind: type = _adapter(model).attention
    return [module for module in model.modules() if isinstance(module, kind)]


def _name(module: torch.nn.Module) -> str:
    """Return the name of the module's own forward, which accelerate's hooks move."""
    return "_old_forward" if hasattr(module, "_old_forward") else "forward"


def _forward(
    attend: Callable[..., tuple], module: torch.nn.Module, *args: Any, **kwargs: Any
) -> tuple:
    """Attend through kvloom if the step has a kvloom cache, else as the module does."""
    cache = kwargs.get("layer_past", kwargs.get("past_key_values"))
    if isinstance(cache, RoutedCache):
        return attend(module, cache.layers[module.layer_idx], *args, **kwargs)
    return getattr(module, _OWN)(*args, **kwargs)


@contextmanager
def masks(model: PreTrainedModel) -> Iterator[None]:
    """Make an adapted model build kvloom's masks, during a step with a kvloom cache."""
    routing = model._kvloom
    if routing is None or routing.config is not None:  # not adapted
        yield
        return
    AttentionMaskInterface.register(_MASKS, _mask)
    own = model.config._attn_implementation
    model.config._attn_implementation_internal = _MASKS
    try:
        yield
    finally:
        model.config._attn_implementation_internal = own


def _mask(*args: Any, **kwargs: Any) -> Tensor:
    """Return the 2-D padding mask, or an empty one without padding: MPT cannot handle None.

    These models are plainly causal, although Falcon always requires a mask.
    """
    mask = attention.mask(*args, **{**kwargs, "allow_is_causal_skip": True})
    return torch.empty(0, 0, dtype=torch.bool) if mask is None else mask
