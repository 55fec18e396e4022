"""The attention and mask functions that transformers calls during a step with a kvloom cache.

`routed` makes a model's decoder use them, for one step. Decides what computes attention. Keys that
carry a kvloom layer go to that layer, with the padding mask that `mask` returned in the same step.
All others (sliding layers, for example) go to the model's own implementation, with its own masks.
kvloom refuses a mask or an argument of attention that it does not know, instead of dropping it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.step import Queries, StepInputs
from ..errors import CacheMisuse
from .adapter_registry import ADAPTERS
from .compat import padding_mask
from .routed import RoutedLayer

NAME = "kvloom"
FIELD = "_attn_implementation_internal"
"""The attribute of a config that names its attention implementation."""

_WITHOUT_EFFECT = frozenset({
    "cache_position", "is_causal", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "sliding_window",
    "use_cache",
})  # fmt: skip
"""Arguments of attention that change nothing in a layer whose mask is plainly causal."""

_LOCK = threading.Lock()
_OWN: dict[int, tuple[str, int]] = {}
"""By the id of each config in a routed step: the model's own implementation, and how many steps
of threads run."""


@contextmanager
def routed(configs: Sequence[Any]) -> Iterator[None]:
    """Make the modules of these configs call kvloom's functions, within one step."""
    with _LOCK:
        for config in configs:
            attributes = vars(config)  # setting one by its name takes transformers 4 us
            own, steps = _OWN.get(id(config), (attributes[FIELD], 0))
            _OWN[id(config)] = own, steps + 1
            attributes[FIELD] = NAME
    try:
        yield
    finally:
        with _LOCK:
            for config in configs:
                own, steps = _OWN.pop(id(config))
                if steps > 1:
                    _OWN[id(config)] = own, steps - 1
                else:
                    vars(config)[FIELD] = own


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend query [B, Hq, T, D]; returns [B, T, Hq, D] contiguous, and the weights or None.

    Raises `CacheMisuse` where a kvloom layer would have to drop the mask or an argument.
    """
    layer = getattr(key, "_kvloom_layer", None)
    if layer is None:
        own_mask = getattr(attention_mask, "_kvloom_own", None)
        if own_mask is not None:
            attention_mask = own_mask()
        own = _own_attention(module)
        return own(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    softcap = kwargs.pop("softcap", None)
    check_arguments(layer, kwargs)
    visible = visible_tokens(layer, attention_mask)
    if attention_mask is None and query.shape[2] > 1 and not _causal(module, kwargs):
        raise _not_causal(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = layer.attend(StepInputs(Queries(query, scale, visible, softcap), key, value))
    return out.transpose(1, 2).contiguous(), None


def mask(
    *args: Any,
    config: Any,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the padding mask of a plainly causal layer, bool [B, N]; [0, 0] without padding.

    Sliding and chunked layers, masks that are not plainly causal (image blocks), and masks that the
    model itself reads get what the model's own implementation makes.
    """
    make = ALL_MASK_ATTENTION_FUNCTIONS[own_implementation(config)]
    own = partial(
        make, *args, config=config, kv_length=kv_length,
        mask_function=mask_function, attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **kwargs,
    )  # fmt: skip
    plainly_causal = (
        mask_function is causal_mask_function and local_size is None and allow_is_causal_skip
    )
    if not plainly_causal and config.model_type not in ADAPTERS:  # an adapter is plainly causal
        made = own()
        if isinstance(made, Tensor):
            made._kvloom_made = True  # type: ignore[attr-defined]
        return made
    if attention_mask is None or attention_mask.all():
        padding = torch.empty(0, 0, dtype=torch.bool)
    else:
        padding = padding_mask(attention_mask, kv_length)
    padding._kvloom_own = own  # type: ignore[attr-defined]
    return padding


def visible_tokens(layer: RoutedLayer, mask: Tensor | None) -> Tensor | None:
    """Return the visible tokens that `mask` found, bool [B, 1, N]; None without padding.

    Raises `CacheMisuse` for other masks: a layer that sees all earlier tokens cannot use them.
    """
    if mask is None:
        return None
    if hasattr(mask, "_kvloom_own"):
        return mask[:, None] if mask.numel() else None
    if hasattr(mask, "_kvloom_made"):
        raise _not_causal(layer)
    raise CacheMisuse(
        f"{layer.cache.name}: the model made a mask of its own, of shape {tuple(mask.shape)}, "
        "which kvloom does not compute; use transformers' own cache"
    )


def check_arguments(layer: RoutedLayer, arguments: dict[str, Any]) -> None:
    """Raise `CacheMisuse` for an argument of attention that changes its result."""
    for name, argument in arguments.items():
        if name in _WITHOUT_EFFECT or argument is None or argument is False:
            continue
        if name == "dropout":
            if argument == 0.0:
                continue
            raise CacheMisuse(
                f"{layer.cache.name}: kvloom computes no dropout in attention, and the model asks "
                f"for {argument:g}; call model.eval()"
            )
        if name == "output_attentions":
            raise CacheMisuse(
                f"{layer.cache.name}: kvloom computes no attention weights; leave out "
                "output_attentions, or call kvloom.detach(model)"
            )
        meaning = " (attention sinks)" if name in ("s_aux", "sinks") else ""
        raise CacheMisuse(
            f"{layer.cache.name}: the model's attention takes {name!r}{meaning}, which kvloom does "
            "not compute; use transformers' own cache"
        )


def _causal(module: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether a query without a mask sees no later tokens, as transformers decides it."""
    given = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _not_causal(layer: RoutedLayer) -> CacheMisuse:
    return CacheMisuse(
        f"{layer.cache.name}: tokens of this input see later ones, or not all earlier ones (an "
        "image, a bidirectional prefix, packed sequences), which kvloom does not compute; use "
        "plain text, or transformers.DynamicCache(config=model.config) as past_key_values"
    )


def own_implementation(config: Any) -> str:
    """Return the attention implementation of a config without kvloom."""
    own = _OWN.get(id(config), (config._attn_implementation, 0))[0]
    if own == NAME:
        raise CacheMisuse(
            "attention implementation 'kvloom' works during a step with a kvloom cache only; load "
            'the model with another one, such as "sdpa", and call kvloom.attach(model)'
        )
    return own


def _own_attention(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that a module would call without kvloom."""
    name = own_implementation(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return found
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise CacheMisuse(
            f"kvloom does not find the {name!r} attention of {type(module).__name__}; call "
            'model.set_attn_implementation("sdpa")'
        )
    return eager


def register() -> None:
    """Register "kvloom" with transformers as an attention implementation."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
