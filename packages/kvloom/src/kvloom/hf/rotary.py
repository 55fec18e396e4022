"""Find how each layer of a model rotates its keys, by running the model.

Decides whether kvloom can reproduce a rotary embedding: `Rope` must rotate a layer's keys from one
position to another exactly as the model does. Scaled frequencies (linear, Llama 3, YaRN), partial
rotary, both pairings and layers without rotation pass; frequencies that change with the length do
not. The keys of single tokens show it: a token that attends to itself alone gets the same hidden
states at any position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ..errors import IncompatibleRecipe, UnsupportedModel
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from . import compat, models

CHANGING = ("dynamic", "longrope")
"""Kinds of rotary embeddings that change with the length of a text."""

_START, _END = 3, 40  # positions
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.03

_FOUND: WeakKeyDictionary[PreTrainedModel, tuple[list[Tensor], Positions]] = WeakKeyDictionary()
"""What running each model has shown, and the frequencies that it had then."""


class Positions(NamedTuple):
    """How a model gives tokens their positions.

    ropes: one for each layer that kvloom compresses; None: it does not rotate its keys. learned:
    the model adds an embedding of the position to that of the token.
    """

    ropes: tuple[Rope | None, ...]
    learned: bool = False


def layer_ropes(model: PreTrainedModel) -> tuple[Rope | None, ...]:
    """Return the rotary embedding of each layer that kvloom compresses; None: it has none.

    Raises `UnsupportedModel` if a layer has one that cannot be undone and redone.
    """
    limit = compat.max_positions(model)
    return tuple(
        None if rope is None else rope._replace(positions=limit) for rope in _positions(model).ropes
    )


def renumbering(
    model: PreTrainedModel, recipe: Recipe
) -> tuple[tuple[Rope | None, ...] | None, bool]:
    """Return how tokens get other positions if the recipe renumbers them.

    Returns the rotary embedding of the keys of each layer (None: no key is re-rotated), and whether
    new tokens need smaller learned positions after an eviction. Raises `UnsupportedModel`, or
    `IncompatibleRecipe` where positions are learned and the layers would not agree on them.
    """
    layer_indices = compat.geometry(model).layer_indices
    keeps = {recipe.for_layer(layer_index, layer_indices).keep for layer_index in layer_indices}
    if not any(keep is not None and keep.renumbers for keep in keeps):
        return None, False
    positions = _positions(model)
    equal = len(keeps) == 1 and all(k is not None and k.budget.layers == "uniform" for k in keeps)
    if positions.learned and not equal:
        raise IncompatibleRecipe(
            recipe.name,
            [
                'positions="renumbered" gives a token one learned position for all layers, so they '
                'must hold equally many tokens; use layers="uniform" and one keep for all layers'
            ],
        )
    if positions.learned and not all(
        compat.takes(module, "position_ids") for module in (model, compat.decoder(model))
    ):
        raise UnsupportedModel(
            f"{type(model).__name__}: its forward takes no position_ids, so new tokens cannot get "
            'other positions; use positions="original"'
        )
    return positions.ropes, positions.learned


def _positions(model: PreTrainedModel) -> Positions:
    """Return what an adapter says of the model, or what running it shows.

    It runs once for the same frequencies: `model.to(dtype)` rounds them.
    """
    config, count = compat.decoder_config(model), compat.geometry(model).layers
    adapter = models.adapter_of(config)
    if adapter is not None and adapter.rope is not None:
        return Positions((adapter.rope(config),) * count)
    if compat.has_alibi(config):
        return Positions((None,) * count)
    if model.get_input_embeddings().weight.is_meta:
        return _without_weights(model, count)
    frequencies = [rope.inv_freq.cpu() for rope, _ in _candidates(model)]
    if model not in _FOUND or not all(map(torch.equal, frequencies, _FOUND[model][0])):
        _FOUND[model] = frequencies, _find(model, count)
    return _FOUND[model][1]


def _without_weights(model: PreTrainedModel, count: int) -> Positions:
    """Return embeddings of the right size for a model on the meta device, which runs no step."""
    first = next(_candidates(model), None)
    rope = (
        None if first is None else Rope(torch.ones_like(first.rope.inv_freq, device="cpu"), False)
    )
    return Positions((rope,) * count, learned=rope is None)


def _find(model: PreTrainedModel, count: int) -> Positions:
    candidates = list(_candidates(model))
    if not compat.takes(compat.decoder(model), "position_ids"):
        if candidates:
            raise _not_understood(model)
        return Positions((None,) * count, learned=True)
    try:
        starts, ends = _keys_at(model, _START), _keys_at(model, _END)
    except Exception as error:  # whatever the model's own code raises
        raise _not_understood(model) from error
    pairs = zip(starts, ends, strict=True)
    if not candidates:
        return Positions((None,) * count, learned=not all(_equal(*keys) for keys in pairs))
    return Positions(tuple(_rope(model, candidates, *keys) for keys in pairs))


class _Embedding(NamedTuple):
    """A rotary embedding that layers of a model may have, and its kind, such as "yarn"."""

    rope: Rope
    kind: str | None


def _candidates(model: PreTrainedModel) -> Iterator[_Embedding]:
    """Yield the rotary embeddings of the decoder's modules, in both pairings."""
    for module in compat.decoder(model).modules():
        for name, inv_freq in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name:
                continue
            kind = getattr(module, "rope_type", None)
            kind = kind.get(name.removesuffix("_inv_freq")) if isinstance(kind, dict) else kind
            for interleaved in (False, True):
                rope = Rope(inv_freq.detach().float().clone(), interleaved)
                yield _Embedding(rope, kind)


def _rope(
    model: PreTrainedModel, candidates: list[_Embedding], start: Tensor | None, end: Tensor | None
) -> Rope | None:
    """Return the candidate that rotates a layer's keys; None if they are not rotated.

    Keys that are not finite show nothing: the first step will refuse them.
    """
    if start is None or end is None or _equal(start, end):
        return None
    if not end.isfinite().all():
        return candidates[0].rope
    shift = torch.tensor([[[_END - _START]]])
    for rope, kind in candidates:
        fits = 2 * len(rope.inv_freq) <= start.shape[-1]
        if fits and _equal(rope.rotate(start.float(), shift).to(start.dtype), end):
            _refuse_changing(model, kind)
            return rope
    raise _not_understood(model)


def constant_inv_freq(embedding: torch.nn.Module) -> Tensor:
    """Return the frequencies of a rotary embedding, fp32 [dims / 2].

    Raises `UnsupportedModel` if they change with the length.
    """
    _refuse_changing(embedding, getattr(embedding, "rope_type", None))
    inv_freq: Tensor = embedding.get_buffer("inv_freq")
    return inv_freq.detach().float().clone()


def changes(module: torch.nn.Module) -> bool:
    """Return whether a module is a rotary embedding that changes with the length of a text."""
    kind = getattr(module, "rope_type", None)
    return any(x in CHANGING for x in (kind.values() if isinstance(kind, dict) else [kind]))


def _refuse_changing(module: torch.nn.Module, kind: str | None) -> None:
    if kind in CHANGING:
        raise UnsupportedModel(
            f"{type(module).__name__}: its rotary embedding ({kind}) changes with the length, so "
            'keys cannot be moved to other positions; use positions="original"'
        )


def _equal(x: Tensor | None, y: Tensor | None) -> bool:
    """Return whether keys differ by rounding alone, or there are none."""
    if x is None or y is None:
        return True
    tolerance = _TOLERANCE.get(x.dtype, _HALF_TOLERANCE)
    return bool((x.float() - y.float()).norm() <= tolerance * y.float().norm())


def _not_understood(model: PreTrainedModel) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__}: kvloom does not understand its rotary embedding, so keys cannot "
        'be moved to other positions; use positions="original"'
    )


@torch.no_grad()
def _keys_at(model: PreTrainedModel, position: int) -> list[Tensor | None]:
    """Return the keys [4, Hk, 1, D] of four tokens that are each alone at a position, by layer.

    None: the layer has stored no keys.
    """
    stock = compat.stock_layers(model)
    cache, decoder = DynamicCache(), compat.decoder(model)
    cache.layers = stock
    weight = model.get_input_embeddings().weight
    ids = torch.arange(1, 5, device=weight.device)[:, None] * (len(weight) // 5)
    with compat.evaluating(decoder):
        decoder(
            input_ids=ids, position_ids=torch.full_like(ids, position), past_key_values=cache,
            use_cache=not compat.refuses_caches(model),
        )  # fmt: skip
    geometry = compat.geometry(model)
    side = "values" if geometry.latent else "keys"  # the positional part comes after the latent
    return [getattr(stock[layer_index], side) for layer_index in geometry.layer_indices]
