"""The forward of a routed model: one call is one step of its cache, whole or not at all.

Decides which cache a call uses, and that a failure or an interrupt anywhere in the call leaves that
cache as it was.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import CacheMisuse
from . import attention, compat, examples, repetition, stock
from .freed import return_freed
from .guard import note_inputs
from .implementation import other_attention, use_kvloom
from .routed_cache import RoutedCache
from .routed_layer import RoutedLayer


class RoutedForward:
    """Replaces the forward of `module`, which is `model` or its decoder.

    Both have one, as callers may call either: the outer call is the step, in which the model's call
    of its decoder is a part. Does nothing if `model` is not routed, and in calls without a kvloom
    cache.
    """

    def __init__(self, model: PreTrainedModel, module: torch.nn.Module) -> None:
        self.model, self.module = model, module
        self.replaced = vars(module).get("forward")  # a forward that other code had set
        self.refuses_caches = compat.refuses_caches(model)

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's forward without kvloom."""
        return self.replaced or types.MethodType(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the module's own forward, which transformers reads."""
        return inspect.signature(self.forward)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, never compiled: a compiled step would not see the cache.

        Raises `CacheMisuse` before anything has changed.
        """
        if getattr(self.model, "_kvloom", None) is None:
            return self.forward(*args, **kwargs)
        if args:
            signature = compat.signature_of(type(self.module).forward)
            _, *named = signature.bind_partial(self.module, *args).arguments.items()
            kwargs = dict(named, **kwargs)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, RoutedCache) and cache.guard.running:  # within the model's call
            return self.run(kwargs)
        steps = cache.steps if isinstance(cache, RoutedCache) else None
        if steps is not None and steps.takes(self, kwargs):
            return steps.run(kwargs)
        if isinstance(cache, RoutedCache) and cache.read_prompt is not None:
            read_prompt, cache.read_prompt = cache.read_prompt, None
            return read_prompt(self, cache, kwargs)
        positions = kwargs.get("position_ids")  # as given: `_prepared` may close them up
        kwargs = {**kwargs, **_prepared(self.model, kwargs)}
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, RoutedCache):
            return self.forward(**kwargs)
        _check_mask(kwargs)
        cache.check_mask(kwargs.get("attention_mask"))
        _check_arguments(self.model, cache, kwargs)
        graphs = self.model._kvloom.graphs
        steps = None if graphs is None else graphs.begin(self, cache, kwargs)
        if steps is not None:
            return steps.run(kwargs)
        return self._step(cache, kwargs, positions)

    def _step(self, cache: RoutedCache, kwargs: dict[str, Any], positions: Any) -> Any:
        """Run the call as a step of the cache, with the passes that its recipe adds.

        positions: the position ids as the caller gave them.
        """
        repeated = repetition.of_prompt(self.model, cache, kwargs)
        # with no layer of kvloom, the model's own attention runs as it is
        kernels = use_kvloom(self.model._kvloom.configs if cache.compressed else ())
        reading = nullcontext() if repeated is None else repeated.reading()
        seen = cache.get_seq_length()
        with cache.step(), kernels, token_ids(cache, kwargs), input_norms(self.model, cache):
            if not seen:
                examples.learn(self.model, cache, kwargs)
            with reading:
                out = self.run(kwargs)
            cache.finish_shared()
            if repeated is not None:
                repeated.score()
                repeated.evict()
            tokens = cache.get_seq_length() - seen
            token_hash = cache.token_hash.after(kwargs, positions, seen, tokens)
            hidden = cache.hidden_after(kwargs.get("attention_mask"), seen, tokens)
            if tokens > 1:
                stock.release(cache.stock_layers)
                cache.moves_positions = compat.moves_positions(self.model)
        cache.token_hash, cache.hidden = token_hash, hidden
        return_freed(tokens)
        return out

    def run(self, kwargs: dict[str, Any]) -> Any:
        """Run the module with a kvloom cache, within a step."""
        _check_positions(kwargs)
        if self.refuses_caches:
            kwargs = {**kwargs, "use_cache": False}
        return self.forward(**kwargs)

    def install(self) -> None:
        """Replace the module's forward."""
        self.module.forward = self

    def uninstall(self) -> None:
        """Restore the former forward, unless other code has replaced this one since."""
        attributes = vars(self.module)
        if attributes.get("forward") is self:
            if self.replaced is None:
                del self.module.forward
            else:
                self.module.forward = self.replaced
        elif attributes.get("_old_forward") is self:  # accelerate has hooked the module since
            self.module._old_forward = self.forward


def _prepared(model: PreTrainedModel, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call to change: the cache, or the positions of new tokens."""
    ids, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    if ids is not None and ids.shape[-1] == 0:
        raise nothing_new(cache)
    if isinstance(cache, RoutedCache):
        cache.check_model(model)
        new = _new_tokens(kwargs)
        if new is None:
            return {}  # the model's own error names what is missing
        cache.check_batch(new.shape[0])
        changes = _without_cached(cache, kwargs)
        if changes:
            kwargs, new = {**kwargs, **changes}, changes["input_ids"]
        if cache.learned_positions:
            changes["position_ids"] = _closed_up(cache, new, kwargs)
        return changes
    attached = model._kvloom.attached
    if attached.new_cache is None or model.training or cache is not None:
        return {}
    use = kwargs.get("use_cache")
    if use is None:
        use = getattr(compat.decoder_config(model), "use_cache", True)
    if not use:
        return {}
    return {"past_key_values": attached.new_cache(model, attached.recipe), "use_cache": True}


def _new_tokens(kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the ids [B, T] of a call, or else its embeddings [B, T, hidden size]."""
    ids: torch.Tensor | None = kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if ids is None else ids


def _check_mask(kwargs: dict[str, Any]) -> None:
    """Raise `CacheMisuse` for a mask that is no 2-D padding mask with the rows of the batch."""
    mask, new = kwargs.get("attention_mask"), _new_tokens(kwargs)
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        is_tensor = isinstance(mask, torch.Tensor)
        shape = f"of shape {tuple(mask.shape)}" if is_tensor else repr(type(mask))
        raise CacheMisuse(
            f"kvloom takes a 2-D padding mask [batch, tokens], got a mask {shape}; give a 2-D mask"
        )
    if new is not None and mask.shape[0] != new.shape[0]:
        raise CacheMisuse(
            f"attention_mask has {mask.shape[0]} rows for a batch of {new.shape[0]}; give it a row "
            "for each"
        )


def _check_arguments(model: PreTrainedModel, cache: RoutedCache, kwargs: dict[str, Any]) -> None:
    """Raise `CacheMisuse` for an argument whose effect kvloom does not compute in its layers."""
    if not cache.compressed:
        return
    if kwargs.get("encoder_hidden_states") is not None:
        raise CacheMisuse(
            "a kvloom cache holds no keys of an encoder, and this call has encoder_hidden_states; "
            "pass use_cache=False, or an EncoderDecoderCache of transformers as past_key_values"
        )
    for config in model._kvloom.configs:
        other = other_attention(config)
        if other not in (None, cache.other_attention):
            raise CacheMisuse(
                f"the model attends by {other[0]!r} since this cache was made, and kvloom has not "
                "compared that; make a new cache"
            )
    weights = kwargs.get("output_attentions")
    if weights is None:
        configs = model.config, compat.decoder_config(model)
        weights = any(getattr(config, "output_attentions", False) for config in configs)
    if weights:
        raise attention.no_weights(cache.compressed[0])
    if model.training and model.is_gradient_checkpointing:
        raise CacheMisuse(
            "transformers stores no tokens in a cache under gradient checkpointing; call "
            "model.gradient_checkpointing_disable() or model.eval()"
        )


def _check_positions(kwargs: dict[str, Any]) -> None:
    """Raise `CacheMisuse` where a recipe derives positions from the order of tokens in an image.

    Position ids [axes, B, T] of three axes differ within an image (M-RoPE).
    """
    positions, cache = kwargs.get("position_ids"), kwargs["past_key_values"]
    if positions is None or positions.dim() != 3 or bool((positions[-3:] == positions[-1]).all()):
        return
    for layer in cache.full_layers:
        layer.check_axes()


def nothing_new(cache: Any, tokens: int = 0) -> CacheMisuse:
    """Return the error of a call with `tokens` tokens in all, none of which is new."""
    seen = cache.get_seq_length() if isinstance(cache, RoutedCache) else 0
    if not seen:
        return CacheMisuse("the prompt is empty: give at least one token")
    return CacheMisuse(
        f"the cache holds {seen} tokens and generate() was given {tokens or 'no more'} in all; it "
        "takes the whole sequence, the tokens in the cache and the new ones: "
        "generate(torch.cat([old_ids, new_ids], dim=-1), past_key_values=cache)"
    )


def _without_cached(cache: RoutedCache, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs without the tokens that the cache holds, where a draft comes with all of them.

    transformers passes the whole sequence in the first step of assisted decoding, even if the cache
    holds most of it.
    """
    ids, seen = kwargs.get("input_ids"), cache.get_seq_length()
    if ids is None or not 0 < seen < cache.accepted_tokens <= ids.shape[-1]:
        return {}
    tokens = ids.shape[-1]
    mask, position = kwargs.get("attention_mask"), kwargs.get("position_ids")
    has_whole_sequence = mask is not None and mask.dim() == 2 and mask.shape[-1] == tokens
    if position is not None and position.shape[-1] == tokens:
        has_whole_sequence = has_whole_sequence or int(position[..., 0].max()) == 0
    if not has_whole_sequence:
        return {}
    along = ("input_ids", "position_ids", "token_type_ids", "cache_position")
    inputs = {name: kwargs[name] for name in along if kwargs.get(name) is not None}
    return {name: x[..., seen:] for name, x in inputs.items() if x.shape[-1] == tokens}


def _closed_up(cache: RoutedCache, new: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Return position ids [B or 1, T] of new tokens, as if dropped ones had never existed."""
    tokens = new.shape[1]
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    padding: Any = 0
    if mask is not None and mask.dim() == 2:
        padding = (mask == 0).sum(dim=-1, keepdim=True)
        if positions is None:
            positions = (mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens:]
    if positions is None:
        seen = cache.get_seq_length()
        positions = torch.arange(seen, seen + tokens, device=new.device)[None]
    dropped = cache.full_layers[0].cache.dropped if cache.full_layers else 0
    evicted = dropped - torch.as_tensor(padding, device=positions.device)
    return positions - evicted.clamp(min=0)


@contextmanager
def token_ids(cache: RoutedCache, kwargs: dict[str, Any]) -> Iterator[None]:
    """Give the layers that need them the token ids of a call, and take them away after it.

    Raises `CacheMisuse` for a call by embeddings.
    """
    layers = [layer for layer in cache.full_layers if layer.needs_ids]
    ids = kwargs.get("input_ids")
    if layers and ids is None:
        raise CacheMisuse(
            "the recipe protects tokens by a rule that reads token ids, not inputs_embeds; give "
            "input_ids, or leave the rule out"
        )
    for layer in layers:
        layer.ids = ids
    try:
        yield
    finally:
        for layer in layers:
            layer.ids = None


@contextmanager
def input_norms(model: PreTrainedModel, cache: RoutedCache) -> Iterator[None]:
    """Give the layers whose scores read them the norms of their inputs, within a call.

    A model whose layers are not one list of modules that take hidden states [B, T, D] gives none.
    """
    reading = {i: layer for i, layer in cache.by_index.items() if layer.uses_input_norms}
    modules = compat.decoder_layers(model) if reading else []
    with ExitStack() as hooks:
        for i, module in enumerate(modules):
            if i in reading:
                hooks.callback(note_inputs(module, partial(_note_norms, reading[i])).remove)
        yield


def _note_norms(layer: RoutedLayer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Note the norm of each token's hidden state, fp32 [B, T]."""
    x = kwargs.get("hidden_states", args[0] if args else None)
    if isinstance(x, torch.Tensor) and x.dim() == 3:
        layer.norms = x.detach().float().norm(dim=-1)
