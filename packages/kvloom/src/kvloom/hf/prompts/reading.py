"""The first step of `generate()` with a prompt store: what is loaded, read and stored.

A prompt of N tokens is read in two calls at least: the whole blocks of its first N - 1 tokens, then
the rest. So a stored prompt continues exactly as it did when it was read. A prompt that the store
does not identify is read as without a store, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import StoreError
from ...recipe.spec import Recipe
from ..routed_cache import RoutedCache
from .identity import BLOCK
from .store import PromptStore

_ALONG = ("input_ids", "position_ids", "cache_position")  # [..., N]
_KNOWN = {*_ALONG, "attention_mask", "past_key_values", "use_cache", "return_dict"}


def read(
    store: PromptStore,
    forward: Callable[..., Any],
    cache: RoutedCache,
    kwargs: dict[str, Any],
) -> Any:
    """Run the step of a prompt with an empty cache, and return what the model returns for its end.

    forward: the model's routed forward. kwargs: the arguments of the step.
    """
    store.count(prompts=1)
    reason = _reason(cache, kwargs)
    if reason is None:
        try:
            return _read(store, forward, cache, kwargs)
        except StoreError as error:
            cache.reset()
            reason = str(error)
    store.count(bypassed=1)
    store.warn(f"a prompt does not use the prompt store: {reason}")
    return forward(**kwargs)


def _read(
    store: PromptStore,
    forward: Callable[..., Any],
    cache: RoutedCache,
    kwargs: dict[str, Any],
) -> Any:
    """Read a prompt with the store; raises `StoreError` before the model has read anything."""
    ids = kwargs["input_ids"]
    tokens = ids.shape[1]
    chain = store.chain(cache, ids[:, :-1])
    store.load(cache, chain, ids)
    reused = cache.get_seq_length()
    ends = [len(chain)] if chain else []
    if cache.recipe.reuse == "blocks":
        ends.insert(0, store.index.last_seen(chain))
        store.index.note(chain, store.max_bytes)
    for end in ends:
        begin = cache.get_seq_length()
        if end * BLOCK <= begin:
            continue
        forward(**_part(kwargs, begin, end * BLOCK))
        try:
            store.store(cache, chain[end - 1].hex(), ids[:, : end * BLOCK])
        except StoreError as error:
            store.warn(str(error))
    out = forward(**_part(kwargs, cache.get_seq_length(), tokens))
    store.count(given=tokens, reused=reused, read=cache.get_seq_length() - reused)
    return out


def _part(kwargs: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """Return the arguments of a call that reads the tokens begin to end after those before."""
    part = {n: kwargs[n][..., begin:end] for n in _ALONG if kwargs.get(n) is not None}
    if kwargs.get("attention_mask") is not None:
        part["attention_mask"] = kwargs["attention_mask"][:, :end]
    return {**kwargs, **part}


def _reason(cache: RoutedCache, kwargs: dict[str, Any]) -> str | None:
    """Return why a prompt is not one row of tokens alone; None if it is."""
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    if ids is None:
        return "it is given by inputs_embeds"
    if ids.shape[0] != 1:
        return f"the batch has {ids.shape[0]} rows (prompts, beams or sequences)"
    if mask is not None and not (mask.shape == ids.shape and bool(mask.all())):
        return "it has padding or a mask"
    if any(layer.cache.recording for layer in cache.compressed):
        return "drafts may be removed again (assisted generation)"
    if any(_protects_later_tokens(layer.cache.recipe) for layer in cache.compressed):
        return "its recipe protects tokens of a whole prompt, and the store reads parts of it"
    config = cache.owner.model.config
    outputs = ("output_hidden_states", "output_attentions", "output_router_logits")
    given = {name: getattr(config, name, False) for name in outputs} | kwargs
    for name, x in given.items():
        keeps_last = name == "logits_to_keep" and isinstance(x, int) and x == 1
        if name not in _KNOWN and not keeps_last and not _is_unused(x):
            return f"the call has {name}"
    places = torch.arange(ids.shape[1], device=ids.device)
    for name in _ALONG[1:]:
        positions = kwargs.get(name)
        if positions is None:
            continue
        if positions.shape[-1] != len(places) or not bool((positions == places).all()):
            return f"it has {name} of its own"
    return None


def _protects_later_tokens(recipe: Recipe) -> bool:
    """Return whether a recipe may mark other tokens if a prompt is read in parts."""
    if recipe.keep is None or not recipe.protect.marks:
        return False
    spans = recipe.protect.spans or ()
    return recipe.keep.when != "prompt" or any(end < 0 for span in spans for end in span)


def _is_unused(x: Any) -> bool:
    """Return whether an argument is empty. Image models pass empty dictionaries."""
    return x is None or x is False or (isinstance(x, dict) and all(map(_is_unused, x.values())))
