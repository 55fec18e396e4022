"""Replaces the forward of attention modules that kvloom cannot route in another way.

They bypass transformers' attention interface, or attend to other heads than they store. Decides
which modules get it, and when it runs: only in a step with a kvloom cache, in the layers that
kvloom compresses. Otherwise the model's own code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..cache.step import Queries, StepInputs
from ..errors import CacheMisuse, UnsupportedModel
from ..positions.alibi import Alibi
from . import attention, compat, masks
from .models import Adapter, adapter_of
from .routed_cache import RoutedCache
from .routed_layer import RoutedLayer

_OWN = "_kvloom_own_forward"
_DROPOUTS = ("attention_dropout", "attn_dropout", "attn_dropout_p", "dropout")
"""Names of the dropout of an attention module."""


def check(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for an adapted model whose modules do not know their layer."""
    for module in _attentions(model):
        if _layer_index(module) is None:
            raise UnsupportedModel(
                f"{type(module).__name__} has no layer_idx or layer_id, so kvloom cannot find its "
                "layer of the cache; set one of them where the module is made"
            )


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
            name, forward = _name(module), getattr(module, _OWN)
            vars(module).pop(name, None)
            if getattr(module, name, None) != forward:  # it was replaced before `install`
                setattr(module, name, forward)
            delattr(module, _OWN)


def attend(
    layer: RoutedLayer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    alibi: Alibi | None = None,
) -> Tensor:
    """Attend q [B, Hq, T, D] to all stored tokens of the layer and to k, v [B, Hk, T, D].

    mask: as `masks.mask` makes it. Returns [B, T, Hq * D]. Raises `CacheMisuse` for other
    masks and for none.
    """
    if mask is None:
        raise CacheMisuse(
            f"{layer.cache.name}: the model made no mask for its attention, so kvloom would not "
            "know its padding; use transformers' own cache"
        )
    visible = masks.visible_tokens(layer, mask)
    k, v = layer.update(k, v)
    out = layer.attend(StepInputs(Queries(q, scale, visible, alibi=alibi), k, v))
    return out.transpose(1, 2).flatten(2)


def projected(x: Tensor, head_dim: int, *projections: torch.nn.Module) -> list[Tensor]:
    """Return hidden states [B, T, E] by each projection, divided into heads: [B, H, T, D]."""
    return [project(x).unflatten(-1, (-1, head_dim)).transpose(1, 2) for project in projections]


def visible_mask(mask: Tensor) -> Tensor | None:
    """Return the mask of visible tokens that `masks.mask` made; None without padding."""
    return mask if mask.numel() else None


def _adapter(model: PreTrainedModel) -> Adapter:
    adapter = adapter_of(compat.decoder_config(model))
    assert adapter is not None
    return adapter


def _attentions(model: PreTrainedModel) -> list[Any]:
    kind: type = _adapter(model).attention
    return [module for module in model.modules() if isinstance(module, kind)]


def _layer_index(module: torch.nn.Module) -> Any:
    """Return the index of the module's layer; None if it has none."""
    return getattr(module, "layer_idx", getattr(module, "layer_id", None))


def _name(module: torch.nn.Module) -> str:
    """Return the name of the module's own forward, which accelerate's hooks move."""
    return "_old_forward" if hasattr(module, "_old_forward") else "forward"


def _forward(
    attend: Callable[..., tuple], module: torch.nn.Module, *args: Any, **kwargs: Any
) -> tuple:
    """Attend through kvloom if the step has a kvloom layer, else as the module does."""
    cache = kwargs.get("layer_past", kwargs.get("past_key_values"))
    own_forward = getattr(module, _OWN)
    if not isinstance(cache, RoutedCache):
        return own_forward(*args, **kwargs)
    layer = cache.layers[_layer_index(module)]
    if not isinstance(layer, RoutedLayer):
        x = args[0] if args else kwargs["hidden_states"]
        mask = masks.stock_mask(kwargs["attention_mask"], x.device)
        stored = layer.get_mask_sizes(mask.shape[-2])[0]
        return own_forward(*args, **{**kwargs, "attention_mask": mask[..., -stored:]})
    dropout = _dropout(module) if module.training else 0.0
    attention.check_arguments(layer, {"dropout": dropout})
    return attend(module, layer, *args, **kwargs)


def _dropout(module: torch.nn.Module) -> float:
    """Return the dropout of a module's attention, in training."""
    rates = [getattr(module, name, 0.0) for name in _DROPOUTS]
    return max(getattr(x, "p", x) for x in rates)
