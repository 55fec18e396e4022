"""A cache as a file: what `Cache.save` writes and `Cache.load` reads.

Decides what a file says of itself and when it is refused; what of a cache is state is in `state`.
The file is safetensors: tensors as they are held (packed stays packed; spare room is not written),
all else as JSON in its metadata, never code. What formats were told of channels is not in it: the
recipe's calibration is asked again, and must say the same.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from .. import __version__
from ..errors import CacheMisuse, RecipeError, SavedCacheError
from ..recalled import RecalledLayer
from ..recipe import Recipe
from ..store import Known, files
from ..store.calibration import checksum
from ..store.codec import Channels
from . import compat, state
from .known import identity, known

if TYPE_CHECKING:
    from .cache import Cache

_KEY = "kvloom_cache"


class Owner:
    """The model that a cache is of, not kept alive by it; a pickle does not know it any more."""

    def __init__(self, model: PreTrainedModel | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)

    def __deepcopy__(self, memo: dict) -> Owner:
        """Return itself: the copy is of the same model."""
        return self

    def __reduce__(self) -> tuple:
        """Leave the model out."""
        return Owner, ()

    @property
    def model(self) -> PreTrainedModel:
        """The model; raises `CacheMisuse` if it is gone."""
        model = None if self._model is None else self._model()
        if model is None:
            raise CacheMisuse(
                "a cache is saved with what tells its model from others, and this one's model is "
                "gone, or was lost in a pickle; save a cache while its model is there"
            )
        return model


def save(cache: Cache, path: str | Path) -> None:
    """Write `path`, whole or not at all; see `Cache.save`."""
    _check_settled(cache)
    recipe = cache.recipe.to_dict()
    if Recipe.from_dict(json.loads(json.dumps(recipe))) != cache.recipe:
        raise SavedCacheError(
            f"recipe {cache.recipe.name!r} has a part of your own, which a file cannot name; save "
            "caches of recipes made of kvloom's parts"
        )
    tensors: dict[str, Tensor] = {}
    about = {
        "format": state.FORMAT, "kvloom": __version__, "recipe": recipe,
        "model": _traits(cache.owner.model),
        "calibration": _tables([layer.cache.known for layer in cache.routed]),
        "layers": [state.take(_held(x), str(i), tensors) for i, x in enumerate(cache.layers)],
    }  # fmt: skip
    files.write(Path(path), tensors, {_KEY: json.dumps(about)}, SavedCacheError)


def load(kind: type[Cache], model: PreTrainedModel, path: str | Path) -> Cache:
    """Read `path` as a `kind`; see `Cache.load`."""
    compat.refuse_unsupported(model)
    path = Path(path)
    about = _about(path)
    _check_model(path, about["model"], _traits(model))
    try:
        recipe = Recipe.from_dict(about["recipe"])
    except RecipeError as error:
        raise SavedCacheError(
            f"{str(path)!r} says no recipe that there is: {error}; prefill anew"
        ) from error
    if _tables(known(model, recipe)) != about["calibration"]:
        raise SavedCacheError(
            f"{str(path)!r} was packed with another calibration than the one found for "
            f"{recipe.name!r} now; put that file back, or prefill anew"
        )
    cache = kind(model, recipe)
    devices = _devices(model)
    with safe_open(path, "pt") as file:
        for i, (layer, said) in enumerate(zip(cache.layers, about["layers"], strict=True)):
            state.Giver(file, devices.get(i, model.device)).give(_held(layer), said, str(i))
    return cache


def _held(layer: Any) -> Any:
    """What a layer of a cache holds: a `LayerCache`, or itself, if it is transformers' own."""
    return getattr(layer, "cache", layer)


def _about(path: Path) -> dict[str, Any]:
    """What a file says of itself, if this kvloom can read it."""
    name = repr(str(path))
    if not path.is_file():
        raise SavedCacheError(f"there is no saved cache {name}; make one with cache.save({name})")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "null"))
    except (SafetensorError, OSError, ValueError) as error:
        raise SavedCacheError(
            f"{name} is cut off, or was never a saved cache; save the cache again"
        ) from error
    if not isinstance(about, dict):
        raise SavedCacheError(
            f"{name} is safetensors, but no saved cache; give a file that cache.save wrote"
        )
    found, by = about.get("format"), about.get("kvloom")
    if found != state.FORMAT:
        raise SavedCacheError(
            f"{name} has cache format {found} of kvloom {by}, and this "
            f"kvloom ({__version__}) reads {state.FORMAT}; use that kvloom, or prefill anew"
        )
    lacks = [part for part in ("recipe", "model", "calibration", "layers") if part not in about]
    if lacks:
        raise SavedCacheError(f"{name} is damaged: its {lacks[0]} is missing; prefill anew")
    return about


def _check_model(path: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Refuse another model, or another dtype, by what differs."""
    differ = [name for name in own if saved.get(name) != own[name]]
    if differ:
        one, other = (
            f"{each.get('model')} with {', '.join(f'{n}={each.get(n)}' for n in differ)}"
            for each in (saved, own)
        )
        raise SavedCacheError(
            f"{str(path)!r} holds a cache of {one}, and this model is {other}; load the model, and "
            "the dtype, that it was saved from"
        )


def _traits(model: PreTrainedModel) -> dict[str, Any]:
    """What must be the same for what is held to mean the same, as JSON gives it back."""
    config = compat.decoder_config(model)
    more = {name: getattr(config, name, None) for name in ("rope_parameters", "sliding_window")}
    dtype = str(model.dtype).removeprefix("torch.")
    return json.loads(json.dumps({**identity(model), "dtype": dtype, **more}, default=str))


def _tables(layers: list[Known]) -> str | None:
    """SHA-256 of what calibration says of the layers' channels; None where none was asked."""
    tables = {
        f"{i}.{side}.{field}": x
        for i, told in enumerate(layers)
        for side, channels in (("keys", told.keys), ("values", told.values))
        if channels is not None
        for field, x in zip(Channels._fields, channels, strict=True)
        if x is not None
    }
    return checksum(tables) if tables else None


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Where each layer attends: a model may lie on several devices."""
    found = {}
    for module in model.modules():
        weight = next(module.parameters(), None)
        if isinstance(getattr(module, "layer_idx", None), int) and weight is not None:
            found[module.layer_idx] = weight.device
    return {i: device for i, device in found.items() if device.type != "meta"}


def _check_settled(cache: Cache) -> None:
    """Refuse a cache in the middle of something; wait for work that is under way."""
    for held in (layer.cache for layer in cache.routed):
        if isinstance(held, RecalledLayer):
            if held.lost:
                raise CacheMisuse(f"{held.name}: this cache is of no use any more: {held.lost}")
            held.aside.wait()
        if held.held is not None:
            raise CacheMisuse(
                f"{held.name}: the newest {held.pending} tokens may still be taken back; call "
                "crop(0) before saving"
            )
    seen = {layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")}
    if len(seen) > 1 or any(layer.armed for layer in cache.routed):
        raise CacheMisuse("the last step failed, so this cache is of no use; save another one")
