"""A cache as a file, which `Cache.save` writes and `Cache.load` reads.

Decides what is in a file's metadata and which files are refused; `LayerState.state` decides what
of a cache is saved. The file is safetensors. It has tensors as the cache stores them, without spare
room, all else as JSON in the metadata, and a checksum of all bytes at the end. It has no code.
It has no calibrated numbers: the recipe's calibration is read again and must be the same. A tensor
is named by its path in the tree of state, as `2.0.storage.keys.packed.codes.live`. An entry of a
prompt store is such a file, with its key and its token ids.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from .. import __version__
from ..cache.layer_state import VERSION
from ..errors import (
    CacheMisuse,
    IncompatibleRecipe,
    RecipeError,
    SavedCacheError,
    TierError,
    UnsupportedModel,
    first_line,
)
from ..recipe.spec import Recipe
from ..store import LayerEncoding, files
from ..store.calibration import checksum
from . import compat, shard, stock
from .hybrid import compressed_part, stock_part
from .layer_facts import local_identity, module_attributes
from .routed_cache import RoutedCache
from .routing import attachment, set_attachment
from .supported import supported_model

_KEY = "kvloom_cache"
_IDS = "prompt.ids"
_HIDDEN = "hidden"  # of `RoutedCache`
_TENSOR = "tensor"  # stands for the tensor of the same path
_CLEAR = (SavedCacheError, UnsupportedModel, TierError, MemoryError, torch.OutOfMemoryError)


def save(
    cache: RoutedCache,
    path: Path,
    error_type: type[Exception] = SavedCacheError,
    prompt: tuple[str, Tensor] | None = None,
    publish: Callable[[str], None] | None = None,
) -> None:
    """Write `path`, whole or not at all; see `Cache.save`.

    prompt: the key and the token ids of an entry of a prompt store. publish: as for `files.write`.
    """
    _check_committed(cache)
    if cache.moves_positions and prompt is None:
        raise SavedCacheError(
            f"{type(cache.owner.model).__name__} moves the positions after images or padding by "
            "numbers that it holds itself; save a cache of text without padding"
        )
    tensors: dict[str, Tensor] = {}
    layers = [flat(_state(x), str(i), tensors) for i, x in enumerate(cache.layers)]
    if cache.hidden is not None:
        tensors[_HIDDEN] = cache.hidden.cpu().contiguous()
    write({**origin(cache), "layers": layers}, tensors, path, error_type, prompt, publish)


def origin(cache: RoutedCache) -> dict[str, Any]:
    """Return what a file says of the model and the recipe; raises `SavedCacheError`."""
    return described(cache.recipe, _traits(cache.owner.model), calibration(cache))


def described(recipe: Recipe, model: dict[str, Any], calibration: str | None) -> dict[str, Any]:
    """Return what a file says, given what it says of the model; raises `SavedCacheError`."""
    try:
        parts = recipe.to_dict()
    except RecipeError as error:
        raise SavedCacheError(f"recipe {recipe.name!r} has a part of your own: {error}") from error
    return {
        "format": VERSION, "kvloom": __version__, "recipe": parts, "model": model,
        "calibration": calibration,
    }  # fmt: skip


def write(
    about: dict[str, Any],
    tensors: dict[str, Tensor],
    path: Path,
    error_type: type[Exception],
    prompt: tuple[str, Tensor] | None = None,
    publish: Callable[[str], None] | None = None,
) -> None:
    """Write a file with these metadata and tensors; the rest as for `save`."""
    if prompt is not None:
        about, tensors = {**about, "prompt": prompt[0]}, {**tensors, _IDS: prompt[1]}
    files.write(path, tensors, {_KEY: json.dumps(about)}, error_type, publish=publish)


def load(
    kind: Callable[[PreTrainedModel, Recipe], RoutedCache], model: PreTrainedModel, path: str | Path
) -> RoutedCache:
    """Read `path` as a `kind`; see `Cache.load`."""
    model = supported_model(model)
    path = Path(path)
    about = read(path)
    before = attachment(model)
    try:
        return _restore(kind, model, path, about)
    except Exception as error:
        if before is None:
            set_attachment(model, None)
        if isinstance(error, _CLEAR):
            raise
        # anything else: a field does not have the expected form
        raise SavedCacheError(
            f"{str(path)!r} cannot be restored ({first_line(error)}); prefill and save the cache "
            "again"
        ) from error


def _restore(
    kind: Callable[[PreTrainedModel, Recipe], RoutedCache],
    model: PreTrainedModel,
    path: Path,
    about: dict[str, Any],
) -> RoutedCache:
    """Return the cache that a file describes."""
    _check_model(path, about["model"], _traits(model))
    try:
        recipe = Recipe.from_dict(about["recipe"])
    except RecipeError as error:
        raise SavedCacheError(
            f"{str(path)!r} has a recipe that this kvloom ({__version__}) does not know: {error}; "
            "prefill and save the cache again"
        ) from error
    try:
        cache = kind(model, recipe)
    except IncompatibleRecipe as error:
        raise SavedCacheError(f"{str(path)!r} cannot be restored: {error}") from error
    if calibration(cache) != about["calibration"]:
        raise SavedCacheError(
            f"{str(path)!r} was packed with another calibration than the one that "
            f"{recipe.name!r} finds now; put the old one back, or prefill and save the cache again"
        )
    fill(cache, path, about)
    return cache


def fill(cache: RoutedCache, path: Path, about: dict[str, Any]) -> None:
    """Load the layers of a file, whose metadata is `about`, into an empty cache."""
    model = cache.owner.model
    devices = _devices(model)
    with safe_open(path, "pt") as file:
        for i, (layer, stored) in enumerate(zip(cache.layers, about["layers"], strict=True)):
            device = devices.get(i, model.device)
            _load_state(layer, nested(stored, str(i), file.get_tensor, device))
        if _HIDDEN in file.keys():  # noqa: SIM118
            cache.hidden = file.get_tensor(_HIDDEN).to(model.device)


def prompt_ids(path: Path) -> Tensor:
    """Return the token ids of an entry of a prompt store."""
    with safe_open(path, "pt") as file:
        ids: Tensor = file.get_tensor(_IDS)
    return ids


def _state(layer: Any) -> Any:
    """Return the states of the parts of a layer: kvloom's, and transformers' own."""
    compressed, stored = compressed_part(layer), stock_part(layer)
    return [
        None if compressed is None else compressed.cache.state(),
        None if stored is None else stock.state(stored),
    ]


def _load_state(layer: Any, saved: Any) -> None:
    """Load a saved state into a new layer."""
    compressed, stored = compressed_part(layer), stock_part(layer)
    if compressed is not None:
        compressed.cache.load_state(saved[0])
    if stored is not None:
        stock.load_state(stored, saved[1])


def read(path: Path, whole: bool = True) -> dict[str, Any]:
    """Check a file's format and checksum; return its metadata.

    whole: False: its header alone is read, and its checksum is not checked.
    """
    name = repr(str(path))
    if os.path.isdir(path):
        raise SavedCacheError(f"{name} is a folder; give the file of a saved cache")
    if not os.path.isfile(path):
        raise SavedCacheError(f"there is no saved cache {name}; make one with cache.save({name})")
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "null"))
        intact = not whole or files.intact(path)
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SavedCacheError(
            f"{name} is damaged, or was never a saved cache; prefill and save the cache again"
        ) from error
    except (OSError, RuntimeError) as error:  # the latter by safetensors, for a file that is gone
        reason = getattr(error, "strerror", None) or error
        raise SavedCacheError(
            f"{name} cannot be read: {reason}; check its permissions and its disk"
        ) from error
    if not isinstance(about, dict) or "format" not in about:
        raise SavedCacheError(
            f"{name} is safetensors, but no saved cache; give a file that cache.save wrote"
        )
    version, writer = about["format"], about.get("kvloom")
    if version != VERSION:
        raise SavedCacheError(
            f"{name} has cache format {version} of kvloom {writer}, and this "
            f"kvloom ({__version__}) reads {VERSION}; use that kvloom, or prefill and save again"
        )
    if not intact:
        raise SavedCacheError(
            f"{name} is damaged: its checksum is wrong; prefill and save the cache again"
        )
    missing = [key for key in ("recipe", "model", "calibration", "layers") if key not in about]
    if missing:
        raise SavedCacheError(
            f"{name} is damaged: its {missing[0]} is missing; prefill and save the cache again"
        )
    return about


def _check_model(path: Path, saved: dict[str, Any], present: dict[str, Any]) -> None:
    """Raise `SavedCacheError` for another rank, model or dtype, with what differs."""
    if saved.get("rank") != present["rank"]:
        file_rank, rank = (traits.get("rank") or "a whole model" for traits in (saved, present))
        raise SavedCacheError(
            f"{str(path)!r} holds the cache of {file_rank}, and this process is {rank}; load the "
            "file that this rank saved, with the same number of ranks"
        )
    theirs, ours = ({**x["attributes"], **x["config"]} for x in (saved, present))
    whole = [name for name in present if name not in ("config", "attributes")]
    differ = [name for name in whole if saved.get(name) != present[name]]
    if "model" not in differ:
        differ += [name for name in ours if name in theirs and theirs[name] != ours[name]]
    saved, present = {**theirs, **saved}, {**ours, **present}
    if differ:
        saved_from, loaded = (
            f"{traits.get('model')} with {', '.join(f'{n}={traits.get(n)}' for n in differ)}"
            for traits in (saved, present)
        )
        raise SavedCacheError(
            f"{str(path)!r} holds a cache of {saved_from}, and this model is {loaded}; load the "
            "model, and the dtype, that it was saved from"
        )


def _traits(model: PreTrainedModel) -> dict[str, Any]:
    """Return what a model must share with the saved one, as JSON returns it.

    Of its config and its modules' attributes, those that both have.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    part = shard.weights_shard(model)
    rank = None if part == shard.WHOLE else str(part)
    traits = {
        **local_identity(model), "rank": rank, "dtype": dtype,
        "config": compat.state_fields(model), "attributes": module_attributes(model),
    }  # fmt: skip
    if any(map(stock.has_states, compat.stock_layers(model))):
        traits["transformers"] = transformers.__version__  # which decides the form of states
    return json.loads(json.dumps(traits, default=str))


def calibration(cache: RoutedCache) -> str | None:
    """Return the SHA-256 of the layers' calibrated numbers; None without calibration."""
    facts = [layer.cache.facts for layer in cache.full_layers]
    return encodings_checksum([(layer.keys, layer.values) for layer in facts])


def encodings_checksum(layers: Sequence[tuple[LayerEncoding | None, ...]]) -> str | None:
    """Return the SHA-256 of the calibrated numbers of keys and values of layers, or None."""
    tables = {
        f"{i}.{side}.{name}": x
        for i, encodings in enumerate(layers)
        for side, encoding in zip(("keys", "values"), encodings, strict=True)
        if encoding is not None
        for name, x in encoding.tensors.items()
    }
    return checksum(tables) if tables else None


def _devices(model: PreTrainedModel) -> dict[int, torch.device]:
    """Return the device of each layer: a model may be on several devices."""
    devices = {}
    for module in model.modules():
        weight = next(module.parameters(), None)
        if isinstance(getattr(module, "layer_idx", None), int) and weight is not None:
            devices[module.layer_idx] = weight.device
    return {i: device for i, device in devices.items() if device.type != "meta"}


def _check_committed(cache: RoutedCache) -> None:
    """Raise `CacheMisuse` in the middle of a step or draft."""
    for layer in (compressed.cache for compressed in cache.compressed):
        layer.check_usable()
        if layer.removable:
            raise CacheMisuse(
                f"{layer.name}: the newest {layer.removable} tokens may still be removed; "
                "call crop(0) before saving"
            )


def flat(tree: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a tree of state as JSON; its tensors go to `tensors`, in host memory."""
    if isinstance(tree, Tensor):
        tensors[path] = tree.detach().cpu().contiguous()
        return _TENSOR
    if isinstance(tree, (list, tuple)):
        return [flat(x, f"{path}.{i}", tensors) for i, x in enumerate(tree)]
    if isinstance(tree, dict):
        return {name: flat(x, f"{path}.{name}", tensors) for name, x in tree.items()}
    if tree is None or isinstance(tree, int | float):
        return tree
    raise TypeError(f"{path}: {type(tree).__name__} is not state")


def nested(data: Any, path: str, tensor: Callable[[str], Tensor], device: torch.device) -> Any:
    """Return the tree that `flat` wrote as JSON; tensors are copied to the device, or to the host.

    tensor: returns a tensor by name; its memory may be a mapped file, which may change.
    """
    if data == _TENSOR:
        host = ".host." in path
        return tensor(path).to("cpu" if host else device, copy=True)
    if isinstance(data, list):
        return [nested(x, f"{path}.{i}", tensor, device) for i, x in enumerate(data)]
    if isinstance(data, dict):
        return {name: nested(x, f"{path}.{name}", tensor, device) for name, x in data.items()}
    return data
