"""The attention and mask functions that transformers calls during a step with a kvloom cache.

`use_kvloom` makes a model's decoder use them, for one step. Decides what computes attention. Keys
that carry a kvloom layer go to that layer, with the padding mask that `mask` returned in the same
step. All others (sliding layers, for example) go to the model's own implementation, with its own
masks. kvloom refuses a mask or an argument of attention that it does not know, instead of dropping
it.
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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.step import Queries, StepInputs
from ..errors import CacheMisuse
from . import latents
from .compat import is_plainly_causal, padding_mask
from .routed import RoutedLayer, expanding_layer

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
_STOCK: dict[int, tuple[str, int]] = {}
"""By the id of each config within `use_kvloom`: the model's own implementation, and how many steps
of threads run."""


@contextmanager
def use_kvloom(configs: Sequence[Any]) -> Iterator[None]:
    """Make the modules of these configs call kvloom's functions, within one step."""
    with _LOCK:
        for config in configs:
            attributes = vars(config)  # setting one by its name takes transformers 4 us
            implementation, steps = _STOCK.get(id(config), (attributes[FIELD], 0))
            _STOCK[id(config)] = implementation, steps + 1
            attributes[FIELD] = NAME
    try:
        yield
    finally:
        with _LOCK:
            for config in configs:
                implementation, steps = _STOCK.pop(id(config))
                if steps > 1:
                    _STOCK[id(config)] = implementation, steps - 1
                else:
                    vars(config)[FIELD] = implementation


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
    layer = getattr(key, "_kvloom_layer", None) or expanding_layer(module)
    if layer is None:
        attention_mask = _stock_mask(attention_mask)
        if kwargs.get("block_indices") is not None:
            attention_mask = _block_mask(module, query, key, attention_mask, kwargs)
        attend = _stock_attention(module)
        return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    attended, first, several = None, not layer.cache.seen, query.shape[2] > 1
    in_window = layer.window is not None
    later_seen, sees_past = None, True
    if isinstance(attention_mask, StockMask) and not in_window:
        later_seen, sees_past = _later_tokens(layer, attention_mask)
    causal = later_seen is None and sees_past
    visible = (tokens_in_window if in_window else visible_tokens)(layer, attention_mask)
    if attention_mask is None and several and not _causal(module, kwargs):
        raise _not_causal(layer)
    arguments = {name: x for name, x in kwargs.items() if name not in ("softcap", "s_aux")}
    check_arguments(layer, arguments)
    if (in_window and several) or (first and (layer.latents is not None or not causal)):
        k, v = (key, value) if first else layer.behind_window(key, value)
        attended = _by_model(module, query, k, v, attention_mask, scaling, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = Queries(
        query, scale, visible, kwargs.get("softcap"), later_seen=later_seen, sees_past=sees_past
    )
    if (sinks := kwargs.get("s_aux")) is not None:
        queries = queries._replace(sink_logits=_sink_logits(module, layer, query, sinks))
    step = StepInputs(queries, key, value, attended)
    out = layer.attend(step if layer.latents is None else _to_latents(module, layer, step))
    return out.transpose(1, 2).contiguous(), None


def _block_mask(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, arguments: dict[str, Any]
) -> Tensor | None:
    """Return the mask of a layer of MiniMax M3, which reads the blocks that an index selects.

    The model makes it for these two implementations alone, and finds kvloom's in their place.
    """
    if stock_implementation(module.config) not in ("eager", "sdpa"):
        return mask
    position, tokens = arguments.get("position_ids"), key.shape[2]
    if position is None:
        position = torch.arange(tokens - query.shape[2], tokens, device=query.device)
    position = position.expand(query.shape[0], -1)
    blocks = arguments["block_indices"]
    make = module.indexer.build_block_mask
    made: Tensor = make(blocks, mask, tokens, query.dtype, query.device, position)
    return made


def _by_model(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    arguments: dict[str, Any],
) -> Tensor:
    """Return attention [B, Hq, T, D] as the model computes it."""
    attend = _stock_attention(module)
    mask = _stock_mask(mask)
    out: Tensor = attend(module, query, key, value, mask, scaling=scaling, **arguments)[0]
    return out.transpose(1, 2)


def _stock_mask(mask: Any) -> Any:
    """Return the mask that the model's own implementation takes."""
    if isinstance(mask, StockMask):
        return mask.as_subclass(Tensor)
    make = getattr(mask, "_kvloom_stock_mask", None)
    return mask if make is None else make()


def _to_latents(module: torch.nn.Module, layer: RoutedLayer, step: StepInputs) -> StepInputs:
    """Return a step to the latents that the module has expanded to the keys and values of `step`.

    Its queries are absorbed where something reads them.
    """
    assert layer.latents is not None
    k, v = layer.latents
    q, needed = step.queries.q, step.attended is None or layer.reads_queries
    q = latents.absorb(module, q) if needed else q[:, :, :0]
    queries = step.queries._replace(q=q)
    return StepInputs(queries, k, v, step.attended, partial(latents.expand, module))


class PaddingMask(Tensor):
    """What `mask` returns for a plainly causal layer: bool [B, N] or [0, 0], without queries.

    A model may index it as a mask [B, H, T, N] by a slice of queries, and gets the same mask.
    _kvloom_visible: bool [B, 1, N], False for padding; None: no padding. _kvloom_stock_mask:
    returns the mask of the model's own implementation.
    """

    _kvloom_visible: Tensor | None
    _kvloom_stock_mask: Callable[[], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a slice of queries, [..., slice, :], be the mask again; all else is a tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is not Tensor.__getitem__ or not _is_slice_of_queries(args[1]):
                return func(*args, **(kwargs or {}))
            mask = args[0].clone().as_subclass(PaddingMask)
        mask._kvloom_visible = args[0]._kvloom_visible
        mask._kvloom_stock_mask = _no_stock_mask
        return mask


class StockMask(Tensor):
    """What `mask` returns for a layer that is not plainly causal: the mask of the model itself.

    A slice of queries is such a mask, too. _kvloom_visible: as of `PaddingMask`.
    """

    @classmethod
    def of(cls, tensor: Tensor, visible: Tensor | None) -> Any:
        """Return a mask of the model, [B or 1, 1, T, N], with the tokens that are not padding."""
        mask: Any = tensor.as_subclass(cls)
        mask._kvloom_visible = visible
        return mask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let a slice of queries be a mask of the model; all else is a tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func is Tensor.__getitem__ and _is_slice_of_queries(args[1]):
                return cls.of(result, args[0]._kvloom_visible)
        return result


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
    model itself reads get what the model's own implementation makes.
    """
    make = ALL_MASK_ATTENTION_FUNCTIONS[stock_implementation(config)]
    stock_mask = partial(
        make, *args, config=config, kv_length=kv_length, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip, local_size=local_size, **kwargs,
    )  # fmt: skip
    padding, visible = torch.empty(0, 0, dtype=torch.bool), None
    if attention_mask is not None and not attention_mask.all():
        padding = padding_mask(attention_mask, kv_offset + kv_length)
        visible = padding[:, None]
    plainly_causal = is_plainly_causal(config, mask_function, allow_is_causal_skip)
    if not plainly_causal or local_size is not None:
        made = stock_mask()
        if not isinstance(made, Tensor):
            return made
        model_reads = local_size is not None or is_plainly_causal(config, mask_function, True)
        if model_reads or not _hides_padding_alone(made, padding):
            marked = StockMask.of(made, visible)
            if made.shape[-2] == 1:
                hides_more = not _hides_padding_alone(made, padding[:, kv_offset:])
                marked._kvloom_hides_more = hides_more
            return marked
    result = padding.as_subclass(PaddingMask)
    result._kvloom_visible, result._kvloom_stock_mask = visible, stock_mask
    return result


def _hides_padding_alone(mask: Tensor, padding: Tensor) -> bool:
    """Return whether a mask [B, 1, T, N] is of one query that sees all tokens but padding.

    padding: bool [B, N], False for padding; [0, 0] if there is none.
    """
    if mask.shape[1:3] != (1, 1):
        return False
    seen = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] == 0
    return bool((seen == padding).all() if padding.numel() else seen.all())


def visible_tokens(layer: RoutedLayer, mask: Tensor | None) -> Tensor | None:
    """Return the visible tokens that `mask` found, bool [B, 1, N]; None without padding.

    Raises `CacheMisuse` for other masks: a layer that sees all earlier tokens cannot use them.
    """
    if mask is None:
        return None
    if isinstance(mask, PaddingMask):
        return mask._kvloom_visible
    if isinstance(mask, StockMask):
        visible: Tensor | None = mask._kvloom_visible  # type: ignore[attr-defined]
        return visible
    raise CacheMisuse(
        f"{layer.cache.name}: the model made a mask of its own, of shape {tuple(mask.shape)}, "
        "which kvloom does not compute; use transformers' own cache"
    )


def _later_tokens(layer: RoutedLayer, mask: Any) -> tuple[Tensor | None, bool]:
    """Return `later_seen` and `sees_past` of `Queries`, of a model's mask [B or 1, 1, T, N].

    Raises `CacheMisuse` where it hides stored tokens: packed tokens have no mask for each query.
    """
    if not hasattr(mask, "_kvloom_later"):
        mask._kvloom_later = _measured(mask)
    later_seen, sees_past = mask._kvloom_later
    if layer.cache.seen and not sees_past:
        raise _not_causal(layer)
    return later_seen, sees_past


def _measured(mask: Any) -> tuple[Tensor | None, bool]:
    """Return how many tokens after its own each query sees, and whether it sees all up to there."""
    visible = mask._kvloom_visible
    sees = (mask if mask.dtype == torch.bool else mask == 0).as_subclass(Tensor)[:, :1]
    rows, _, t, n = sees.shape if visible is None else (len(visible), *sees.shape[1:])
    sees = sees.expand(rows, -1, -1, -1)[:, 0]
    index = torch.arange(n, device=sees.device)
    own, real = index[n - t :], sees.new_ones(rows, n)
    if visible is not None:
        real = visible[:, 0].to(sees.device)
    last = n - 1 - sees.flip(-1).byte().argmax(dim=-1)
    later_seen = ((last - own) * real[:, n - t :]).clamp(min=0)
    wanted = (index <= (own + later_seen)[..., None]) & real[:, None]
    same = (sees == wanted).all(dim=-1) | ~real[:, n - t :]
    alone = mask.shape[1] == 1  # else a mask for each head
    return later_seen if bool(later_seen.any()) else None, alone and bool(same.all())


def tokens_in_window(layer: RoutedLayer, mask: Tensor | None) -> Tensor | None:
    """Return `visible_tokens` of a packed window, whose own mask this is.

    Raises `CacheMisuse` where one new token does not see its whole window; the model attends with
    the masks of several.
    """
    if mask is None:
        return None
    if not isinstance(mask, StockMask):
        raise CacheMisuse(
            f"{layer.cache.name}: the model made a mask of its own for its sliding window, which "
            'kvloom does not compute; use sliding="exact" in the recipe'
        )
    if getattr(mask, "_kvloom_hides_more", False):
        raise _not_causal(layer)
    visible: Tensor | None = mask._kvloom_visible  # type: ignore[attr-defined]
    return visible


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
            raise no_weights(layer)
        raise CacheMisuse(
            f"{layer.cache.name}: the model's attention takes {name!r}, which kvloom does not "
            "compute; use transformers' own cache"
        )


def no_weights(layer: RoutedLayer) -> CacheMisuse:
    """Return the error of a call that asks for the weights of attention."""
    return CacheMisuse(
        f"{layer.cache.name}: kvloom computes no attention weights; leave out output_attentions, "
        "or call kvloom.detach(model)"
    )


def _sink_logits(
    module: torch.nn.Module, layer: RoutedLayer, query: Tensor, sinks: Tensor
) -> Tensor:
    """Return the logits of attention sinks, fp32 [Hq]: the module's own parameter, one per head.

    Raises `CacheMisuse` for others: what the model does with them is not known.
    """
    if sinks is not getattr(module, "sinks", None) or sinks.numel() != query.shape[1]:
        raise CacheMisuse(
            f"{layer.cache.name}: the model's attention takes 's_aux' that are not its own sinks, "
            f"one for each of {query.shape[1]} heads, which kvloom does not compute; use "
            "transformers' own cache"
        )
    return sinks.reshape(-1).float()


def _causal(module: torch.nn.Module, arguments: dict[str, Any]) -> bool:
    """Return whether a query without a mask sees no later tokens, as transformers decides it."""
    is_causal = arguments.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _not_causal(layer: RoutedLayer) -> CacheMisuse:
    return CacheMisuse(
        f"{layer.cache.name}: tokens of this input do not see all tokens before the last one that "
        "they see (packed sequences), or see later ones without a mask, which kvloom does not "
        "compute; use transformers.DynamicCache(config=model.config) as past_key_values"
    )


def stock_implementation(config: Any) -> str:
    """Return the attention implementation of a config without kvloom."""
    name = _STOCK.get(id(config), (config._attn_implementation, 0))[0]
    if name == NAME:
        raise CacheMisuse(
            "attention implementation 'kvloom' works during a step with a kvloom cache only; load "
            'the model with another one, such as "sdpa", and call kvloom.attach(model)'
        )
    return name


def _stock_attention(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that a module would call without kvloom."""
    name = stock_implementation(module.config)
    if name in ALL_ATTENTION_FUNCTIONS:
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[name]
        return function
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
