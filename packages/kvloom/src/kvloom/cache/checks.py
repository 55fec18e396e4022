"""Check the inputs of a step, and crops, before a layer changes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..errors import CacheMisuse, NotFinite
from ..kernels.append.reference import within
from ..store import Store
from .evictor import Phase
from .layer_state import LayerState
from .step import StepInputs


def checked_step(state: LayerState, step: StepInputs) -> StepInputs:
    """Check a step's inputs; return them with padding set to 0 (it may be NaN)."""
    queries, k, v, *_ = step
    traits = k.shape, v.shape, k.dtype, v.dtype, k.device
    if traits != state.traits:
        check_shapes(state.name, state.like, k, v, state.facts.value_dim)
        state.traits = traits
    if not queries.sees_past and state.recipe.reads_queries:
        raise CacheMisuse(
            f"{state.name}: recipe {state.recipe.name!r} scores the prompt, but the attention mask "
            "of this prompt hides earlier tokens (packed sequences), which scores do not support; "
            'use a recipe without scores of the prompt, such as "near-lossless" or "quest"'
        )
    tokens, evictor = state.seen + k.shape[2], state.evictor
    if (
        evictor is not None
        and evictor.phase is Phase.EMPTY
        and tokens > state.recipe.compress_after
    ):
        evictor.check_prompt(tokens)
    alibi = queries.alibi
    step = without_padding(step, state.seen)
    if alibi is not None:
        keep = state.recipe.keep
        if keep is not None and keep.renumbers:
            position = alibi.position - state.dropped  # models that round depend on it
            closed_up = replace(alibi, position=position, closed_up=True)
            step = step._replace(queries=queries._replace(alibi=closed_up))
    return step


def without_padding(step: StepInputs, seen: int = 0) -> StepInputs:
    """Return a step after `seen` tokens with the keys and values of its padding set to 0."""
    if step.queries.visible is None:
        return step
    padding = ~step.queries.visible[:, :, seen:, None]
    return step._replace(k=step.k.masked_fill(padding, 0.0), v=step.v.masked_fill(padding, 0.0))


def check_ids(state: LayerState, ids: Tensor | None) -> None:
    """Raise `CacheMisuse` for a step without the token ids that a rule reads."""
    if ids is None and state.needs_ids:
        raise CacheMisuse(
            f"{state.name}: a rule that protects tokens reads token ids; run the layer by its model"
        )


def check_shapes(
    name: str, like: Tensor | None, k: Tensor, v: Tensor, value_dim: int | None
) -> None:
    """Raise `CacheMisuse` if k, v [B, Hk, T, D] do not match each other, or a layer's `like`.

    value_dim: channels of a value; None: as many as of a key.
    """
    if k.shape[2] == 0:
        raise CacheMisuse(f"{name}: no tokens to attend with; give at least one")
    if k.dtype != v.dtype:
        raise CacheMisuse(
            f"{name}: keys are in {k.dtype} and values in {v.dtype}, as under torch.autocast; call "
            "model.to(dtype) instead"
        )
    if v.shape != (*k.shape[:3], value_dim or k.shape[3]):
        raise CacheMisuse(
            f"{name}: keys {tuple(k.shape)} and values {tuple(v.shape)} do not match; pass keys "
            "and values with equal batch, heads and tokens"
        )
    if like is not None and (cache_traits := _traits(like)) != (key_traits := _traits(k)):
        names = "batch size", "key/value heads", "head dimension", "dtype", "device"
        for what, expected, received in zip(names, cache_traits, key_traits, strict=True):
            if expected != received:
                raise CacheMisuse(
                    f"{name}: this cache holds {what} {expected} and was given {received}; "
                    "make a new cache for another model, dtype or batch"
                )


def out_of_range(
    name: str, store: Store, max_abs: tuple[float, ...], k: Tensor, v: Tensor
) -> NotFinite:
    """Return the error that names numbers which the store cannot hold."""
    side = 1 if within((k,), max_abs[:1]) else 0
    what, x, fmt = (("keys", k, store.keys), ("values", v, store.values))[side]
    if not torch.isfinite(x).all():
        return NotFinite(f"{name}: NaN or infinity in {what}; check the model")
    has_larger = getattr(fmt, "meta", None) in ("fp16", "fp8")
    remedy = 'use meta="bf16" (such as "kivi-4:meta=bf16")' if has_larger else "use recipe full"
    return NotFinite(f"{name}: |x| > {max_abs[side]:g} in {what}; {remedy}")


def check_range(name: str, store: Store, max_abs: tuple[float, ...], k: Tensor, v: Tensor) -> None:
    """Raise `NotFinite` for numbers that the store cannot hold."""
    if k.is_cuda and k.shape[2] == 1:
        return  # reading the result back would stall the device at every step
    if not within((k, v), max_abs):
        raise out_of_range(name, store, max_abs, k, v)


def check_crop(state: LayerState, tokens: int) -> None:
    """Raise `CacheMisuse` if a layer's newest `tokens` tokens cannot be removed.

    Raises `RecipeError` if too few for its budgets would stay of a first prompt and a draft.
    """
    if tokens >= state.seen:
        return
    storage, evictor, left = state.storage, state.evictor, state.seen - tokens
    if evictor is not None and evictor.phase is Phase.EMPTY and left > state.recipe.compress_after:
        evictor.check_prompt(left)
    draft = 0 if state.uncommitted is None else state.uncommitted.tokens
    remedy = "call activate_past_recording() before the step that is to be undone"
    if tokens > draft and evictor is not None and evictor.irreversible:
        if state.dropped > 0:
            raise CacheMisuse(
                f"{state.name}: crop needs tokens that the layer has evicted since; {remedy}"
            )
        if evictor.scoring:
            raise CacheMisuse(
                f"{state.name}: crop cannot take back the scores of removed tokens; {remedy}"
            )
    exact = storage.exact_newest
    if tokens > exact and exact < len(storage):
        raise CacheMisuse(
            f"{state.name}: crop of {tokens} tokens reaches into packed tokens; the newest {exact} "
            "are still exact, or call activate_past_recording() before the step"
        )
    if state.window is not None and storage.first > max(0, state.seen - tokens - state.window + 1):
        raise CacheMisuse(
            f"{state.name}: crop of {tokens} tokens needs tokens that have left the sliding window "
            f"since; {remedy}"
        )
    later = len(storage) - storage.kept
    ragged = state.ragged is not None and state.ragged.stored
    if (storage.kept or ragged or state.dropped > 0) and later < tokens:
        raise CacheMisuse(
            f"{state.name}: crop of {tokens} tokens reaches into tokens of which some were "
            f"dropped; the newest {later} can be removed"
        )


def _traits(x: Tensor) -> tuple:
    """Return batch size, heads, head dimension, dtype and device: the same for all keys."""
    b, h, _, d = x.shape
    return b, h, d, x.dtype, x.device
