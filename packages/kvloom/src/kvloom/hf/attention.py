"""The attention function that transformers calls during a step with a kvloom cache.

Decides what computes attention. Keys that carry a kvloom layer go to that layer, with the mask that
`masks.mask` returned in the same step. All others (sliding layers, for example) go to the model's
own implementation, with its own masks. kvloom refuses a mask or an argument of attention that it
does not know, instead of dropping it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.step import Queries, StepInputs
from ..errors import CacheMisuse
from . import latents
from .implementation import NAME, stock_implementation
from .masks import later_tokens, mask, not_causal, stock_mask, visible_tokens
from .routed_layer import RoutedLayer

_KNOWN = frozenset({
    "cache_position", "is_causal", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "sliding_window",
    "use_cache", "s_aux", "softcap", "tokenizer",
})  # fmt: skip
"""Arguments that change nothing under a plainly causal mask, and two that kvloom computes.

`generate()` passes on the `tokenizer` of stop strings.
"""


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
    layer = getattr(key, "_kvloom_layer", None) or latents.expanding_layer(module)
    if layer is None:
        attention_mask = stock_mask(attention_mask, query.device)
        if kwargs.get("block_indices") is not None:
            attention_mask = _block_mask(module, query, key, attention_mask, kwargs)
        attend = _stock_attention(module)
        return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    attended, first, several = None, not layer.cache.seen, query.shape[2] > 1
    in_window = layer.window is not None
    later_seen, sees_past = later_tokens(layer, attention_mask)
    causal = later_seen is None and sees_past
    visible = visible_tokens(layer, attention_mask)
    if several and not _causal(module, kwargs) and stock_mask(attention_mask, query.device) is None:
        raise not_causal(layer)
    check_arguments(layer, kwargs)
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
    mask = stock_mask(mask, query.device)
    out: Tensor = attend(module, query, key, value, mask, scaling=scaling, **arguments)[0]
    return out.transpose(1, 2)


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


def check_arguments(layer: RoutedLayer, arguments: dict[str, Any]) -> None:
    """Raise `CacheMisuse` for an argument of attention that changes its result."""
    for name, argument in arguments.items():
        if name in _KNOWN or argument is None or argument is False:
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
