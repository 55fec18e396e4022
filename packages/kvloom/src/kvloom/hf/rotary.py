"""Find how a model rotates its keys, by running its own code.

Decides whether kvloom can reproduce a rotary embedding: `Rope` must rotate keys from one position
to another exactly as the model's functions do. Scaled frequencies (linear, Llama 3, YaRN), partial
rotary and both pairings pass; frequencies that change with the length do not.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import IncompatibleRecipe, UnsupportedModel
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from . import compat

_CHANGING = ("dynamic", "longrope")


def model_rope(model: PreTrainedModel) -> Rope | None:
    """Return the rotary embedding of the model's full-attention layers; None if it has none.

    Raises `UnsupportedModel` if it has one that cannot be undone and redone.
    """
    config = compat.decoder_config(model)
    adapter = compat.adapter_of(config)
    if adapter is not None and adapter.rope is not None:
        return adapter.rope(config)
    if compat.has_alibi(config):
        return None
    decoder = compat.decoder(model)
    modules = [m for m in decoder.modules() if _inv_freq(m) is not None]
    if not modules:
        return None
    inv_freq = constant_inv_freq(modules[0])
    apply = getattr(sys.modules[type(decoder).__module__], "apply_rotary_pos_emb", None)
    head_dim = compat.geometry(model).head_dim
    for interleaved in (False, True):
        rope = Rope(inv_freq, interleaved)
        if apply is not None and _agrees(rope, modules[0], apply, head_dim):
            return rope
    raise UnsupportedModel(
        f"{type(model).__name__}: kvloom does not understand its rotary embedding, so keys cannot "
        'be moved to other positions; use positions="original"'
    )


def constant_inv_freq(module: torch.nn.Module) -> Tensor:
    """Return the frequencies of a rotary embedding, fp32 [dims / 2].

    Raises `UnsupportedModel` if they change with the length.
    """
    kind = getattr(module, "rope_type", "default")
    kind = kind.get(compat.FULL) if isinstance(kind, dict) else kind
    if kind in _CHANGING:
        raise UnsupportedModel(
            f"{type(module).__name__}: this rotary embedding ({kind}) changes with the length, so "
            'keys cannot be moved to other positions; use positions="original"'
        )
    inv_freq: Tensor = _inv_freq(module).detach().float().clone()
    return inv_freq


def renumbering(model: PreTrainedModel, recipe: Recipe) -> tuple[Rope | None, bool]:
    """Return how tokens get other positions if the recipe renumbers them.

    Returns the rotary embedding of the model's keys (None: no key is re-rotated), and whether new
    tokens need smaller learned positions after an eviction. Raises `UnsupportedModel` for positions
    that cannot be changed, or `IncompatibleRecipe` where they are learned and the layers would not
    agree on them.
    """
    numbers = compat.geometry(model).numbers
    keeps = {recipe.for_layer(number, numbers).keep for number in numbers}
    if not any(keep is not None and keep.positions != "original" for keep in keeps):
        return None, False
    rope = model_rope(model)
    learned = rope is None and not compat.has_alibi(compat.decoder_config(model))
    equal = len(keeps) == 1 and all(k is not None and k.budget.layers == "uniform" for k in keeps)
    if learned and not equal:
        raise IncompatibleRecipe(
            recipe.name,
            [
                'positions="renumbered" gives a token one learned position for all layers, so they '
                'must hold equally many tokens; use layers="uniform" and one keep for all layers'
            ],
        )
    decoder = compat.decoder(model)
    if learned and "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        raise UnsupportedModel(
            f"{type(decoder).__name__} counts the positions of new tokens itself, so they cannot "
            'get others; use positions="original"'
        )
    return rope, learned


def _inv_freq(module: torch.nn.Module) -> Any:
    inv_freq = getattr(module, f"{compat.FULL}_inv_freq", None)
    return getattr(module, "inv_freq", None) if inv_freq is None else inv_freq


def _agrees(rope: Rope, module: torch.nn.Module, apply: Any, head_dim: int) -> bool:
    """Return whether `rope` rotates keys from position 3 to 40 as the model does."""
    parameters = inspect.signature(module.forward).parameters
    extra = {"layer_type": compat.FULL} if "layer_type" in parameters else {}
    raw = torch.randn(1, 1, 1, head_dim, generator=torch.Generator().manual_seed(0))
    raw = raw.to(rope.inv_freq.device)

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if "k" in inspect.signature(apply).parameters:  # of queries and keys together
            x = apply(x, x, cos, sin)[1]
        else:
            x = apply(x, cos, sin)
        return x

    def key_at(position: int) -> Tensor:
        ids = torch.tensor([[position]], device=raw.device)
        cos, sin = module(raw, ids, **extra)
        dims = cos.shape[-1]
        try:
            return rotated(raw, cos, sin)
        except RuntimeError:  # the model passes only the channels that rotate
            return torch.cat([rotated(raw[..., :dims], cos, sin), raw[..., dims:]], -1)

    try:
        with torch.no_grad():
            want, start = key_at(40), key_at(3)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    by = torch.tensor([[[37]]])
    return torch.allclose(rope.rotate(start, by), want, rtol=1e-3, atol=1e-4)
