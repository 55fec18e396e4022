"""The masks that a model gets in a step with a kvloom cache, and what attention reads from them.

A plainly causal layer needs none but the padding, so it gets a padding mask without queries. Others
get the mask of the model's own implementation, marked with its padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from ..errors import CacheMisuse
from .implementation import runs_step, stock_implementation
from .models import ADAPTERS
from .routed_layer import RoutedLayer


@dataclass
class MaskFacts:
    """What kvloom knows of a mask.

    Attributes:
        visible: bool [B, 1, N], False for padding; None: no padding.
        make_stock: For a padding mask, returns the mask of the model's own implementation. None:
            the mask is the model's own.
        hides_more: Whether it hides more than padding from its only query.
        later: What `later_tokens` returns, once it has been measured.
    """

    visible: Tensor | None
    make_stock: Callable[[], Any] | None = None
    hides_more: bool = False
    later: tuple[Tensor | None, bool] | None = None


class RoutedMask(Tensor):
    """What `mask` returns: a padding mask, bool [B, N] or [0, 0], or a mask of the model itself.

    A model may index either as a mask [B, H, T, N] by a slice of queries. A padding mask stays the
    same; a mask of the model becomes that of these queries.
    """

    facts: MaskFacts

    @classmethod
    def of(cls, tensor: Tensor, facts: MaskFacts) -> RoutedMask:
        """Return a mask with what kvloom knows of it."""
        mask = tensor.as_subclass(cls)
        mask.facts = facts
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a slice of queries, [..., slice, :], be a mask again; all else is a tensor.

        So is a mask on another device: accelerate moves the arguments of layers.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if func is not Tensor.__getitem__ or not _is_slice_of_queries(args[1]):
                out = func(*args, **(kwargs or {}))
                moved = func is Tensor.to and isinstance(args[0], cls)
                moved = moved and out.dtype == args[0].dtype
                return cls.of(out, args[0].facts) if moved else out
            facts = args[0].facts
            if facts.make_stock is None:
                return cls.of(func(*args), MaskFacts(facts.visible))
            return cls.of(args[0].clone(), MaskFacts(facts.visible, _no_stock_mask))


def _is_slice_of_queries(index: Any) -> bool:
    """Return whether an index is [..., slice, :] or [:, :, slice, :]."""
    return (
        isinstance(index, tuple)
        and (len(index) == 4 or (len(index) == 3 and index[0] is Ellipsis))
        and isinstance(index[-2], slice)
        and index[-1] == slice(None)
    )


def _no_stock_mask() -> Any:
    raise CacheMisuse(
        "the model attends by a part of its queries in a layer that kvloom does not compress; use "
        "transformers' own cache"
    )


def mask(
    *args: Any,
    config: Any,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return the padding mask of a plainly causal layer, bool [B, N]; [0, 0] without padding.

    Sliding and chunked layers, masks that are not plainly causal (image blocks), and masks that the
    model itself reads get what the model's own implementation makes; so do the calls of other
    threads, whose attention may find that implementation when this step has ended.
    """
    if isinstance(attention_mask, RoutedMask) and not attention_mask.numel():
        attention_mask = None  # an outer model has made a mask without padding
    make = ALL_MASK_ATTENTION_FUNCTIONS[stock_implementation(config)]
    make_stock = partial(
        make, *args, config=config, kv_length=kv_length, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **kwargs,
    )  # fmt: skip
    if not runs_step():
        made: Tensor | None = make_stock()
        return made
    padding, visible = torch.empty(0, 0, dtype=torch.bool), None
    if attention_mask is not None:
        filled = padding_mask(attention_mask, kv_offset + kv_length)
        if not filled.all():
            padding, visible = filled, filled[:, None]
    plainly_causal = is_plainly_causal(config, mask_function, allow_is_causal_skip)
    if not plainly_causal or local_size is not None:
        made = make_stock()
        if not isinstance(made, Tensor):
            return made
        model_reads = local_size is not None or is_plainly_causal(config, mask_function, True)
        if model_reads or not _hides_padding_alone(made, padding):
            hides_more = made.shape[-2] == 1
            hides_more = hides_more and not _hides_padding_alone(made, padding[:, kv_offset:])
            return RoutedMask.of(made, MaskFacts(visible, hides_more=hides_more))
    return RoutedMask.of(padding, MaskFacts(visible, make_stock))


def _hides_padding_alone(mask: Tensor, padding: Tensor) -> bool:
    """Return whether a mask [B, 1, T, N] is of one query that sees all tokens but padding.

    padding: bool [B, N], False for padding; [0, 0] if there is none.
    """
    if mask.shape[1:3] != (1, 1):
        return False
    seen = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    return bool((seen == padding).all() if padding.numel() else seen.all())


def is_plainly_causal(
    config: Any, mask_function: Callable[..., Any], model_reads_no_mask: bool
) -> bool:
    """Return whether a token sees all earlier tokens that are not padding, and no others.

    mask_function: as transformers makes masks from it. model_reads_no_mask: whether the model
    itself reads no mask; an adapter reads it in the model's place.
    """
    if config.model_type == "falcon":  # transformers 5.10 adds a function that is always true
        return True
    is_causal = mask_function is causal_mask_function
    return is_causal and (model_reads_no_mask or config.model_type in ADAPTERS)


def padding_mask(mask: Tensor, tokens: int) -> Tensor:
    """Return a 2-D mask [B, n] as bool [B, tokens]: cut or filled with False, as transformers."""
    mask = mask.bool()
    if mask.shape[-1] < tokens:
        mask = torch.nn.functional.pad(mask, (0, tokens - mask.shape[-1]))
    return mask[:, :tokens]


def stock_mask(mask: Any, device: torch.device) -> Any:
    """Return the mask that the model's own implementation takes, on a device."""
    if isinstance(mask, RoutedMask):
        make = mask.facts.make_stock
        mask = mask.as_subclass(Tensor) if make is None else make()
    return mask.to(device) if isinstance(mask, Tensor) else mask


def visible_tokens(layer: RoutedLayer, mask: Tensor | None) -> Tensor | None:
    """Return the visible tokens that `mask` found, bool [B, 1, N]; None without padding.

    Raises `CacheMisuse` for other masks, and where one new token does not see its whole window; the
    model attends with the masks of several.
    """
    if mask is None:
        return None
    in_window = layer.window is not None
    if not isinstance(mask, RoutedMask) or (in_window and mask.facts.make_stock is not None):
        of, remedy = f", of shape {tuple(mask.shape)}", "use transformers' own cache"
        if in_window:
            of, remedy = " for its sliding window", 'use sliding="exact" in the recipe'
        raise CacheMisuse(
            f"{layer.cache.name}: the model made a mask of its own{of}, which kvloom does not "
            f"compute; {remedy}"
        )
    if in_window and mask.facts.hides_more:
        raise not_causal(layer)
    return mask.facts.visible


def later_tokens(layer: RoutedLayer, mask: Tensor | None) -> tuple[Tensor | None, bool]:
    """Return `later_seen` and `sees_past` of `Queries`, of a model's mask [B or 1, 1, T, N].

    Raises `CacheMisuse` where it hides stored tokens: packed tokens have no mask for each query.
    """
    if layer.window is not None or not isinstance(mask, RoutedMask) or mask.facts.make_stock:
        return None, True
    if mask.facts.later is None:
        mask.facts.later = _measured(mask)
    later_seen, sees_past = mask.facts.later
    if layer.cache.seen and not sees_past:
        raise not_causal(layer)
    return later_seen, sees_past


def _measured(mask: RoutedMask) -> tuple[Tensor | None, bool]:
    """Return how many tokens after its own each query sees, and whether it sees all up to there."""
    visible = mask.facts.visible
    sees = (mask if mask.dtype == torch.bool else mask == 0).as_subclass(Tensor)[:, :1]
    rows, _, t, n = sees.shape if visible is None else (len(visible), *sees.shape[1:])
    sees = sees.expand(rows, -1, -1, -1)[:, 0]
    index = torch.arange(n, device=sees.device)
    step_index, real = index[n - t :], sees.new_ones(rows, n)
    if visible is not None:
        real = visible[:, 0].to(sees.device)
    last = n - 1 - sees.flip(-1).byte().argmax(dim=-1)
    later_seen = ((last - step_index) * real[:, n - t :]).clamp(min=0)
    wanted = (index <= (step_index + later_seen)[..., None]) & real[:, None]
    matches = (sees == wanted).all(dim=-1) | ~real[:, n - t :]
    for_all_heads = mask.shape[1] == 1  # else a mask for each head
    return later_seen if bool(later_seen.any()) else None, for_all_heads and bool(matches.all())


def not_causal(layer: RoutedLayer) -> CacheMisuse:
    """Return the error of a call whose tokens do not see all earlier ones."""
    return CacheMisuse(
        f"{layer.cache.name}: tokens of this input do not see all tokens before the last one that "
        "they see (packed sequences), or see later ones without a mask, which kvloom does not "
        "compute; use transformers.DynamicCache(config=model.config) as past_key_values"
    )
