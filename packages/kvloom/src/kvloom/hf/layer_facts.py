"""The calibration and rotary embedding of a model, which the formats of a recipe need.

Decides where to search for a calibration, and whether it belongs to this model. Reads each file
once per model, not once per cache.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..errors import CalibrationError, IncompatibleRecipe, UnsupportedModel
from ..positions.rope import Rope
from ..recipe.geometry import Geometry
from ..recipe.spec import Recipe
from ..store import LayerFacts
from ..store.calibration import Calibration, of_heads
from . import compat, rotary, shard

CALIBRATION_FILE = "calibration.kvcal"
"""The name of a calibration in the folder of a model's weights.

Not `.safetensors`, although that is the format: loaders such as vLLM's read every `*.safetensors`
file in that folder as weights.
"""

BOOKKEEPING = {*vars(torch.nn.Module()), "_is_hf_initialized", "hf_device_map", "name_or_path",
               "warnings_issued"} - {"training"}  # fmt: skip
"""Attributes of modules that do not change what a model computes."""
_OF_A_CALL = {"training", "gradient_checkpointing", "max_seq_len_cached"}  # what may differ later
_SAMPLE = 64  # numbers of a tensor that identify it
_READ: WeakKeyDictionary[PreTrainedModel, dict[tuple, Any]] = WeakKeyDictionary()


def load_layer_facts(model: PreTrainedModel, recipe: Recipe) -> list[LayerFacts]:
    """Return what the formats of each layer of full attention need.

    Raises `IncompatibleRecipe` where a calibration or a rotary embedding is missing, and for a
    recipe that was tuned for another model.
    """
    check_tuned(model, recipe)
    geometry = compat.geometry(model)
    places = geometry.layer_indices
    plain = {n: recipe.for_layer(n, places) for n in places}
    try:
        ropes = _ropes(model, plain)
        return [_layer_facts(model, geometry, plain[n], n, ropes.get(n)) for n in places]
    except CalibrationError as error:
        raise IncompatibleRecipe(recipe.name, [str(error)]) from error


def check_tuned(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raise `IncompatibleRecipe` for a recipe that was tuned for other weights."""
    if recipe.tuned is None:
        return
    weights = _read_once(model, ("weights",), lambda: identity(model)["weights"])
    if recipe.tuned.model != weights:
        raise IncompatibleRecipe(
            recipe.name,
            [
                f"it was tuned for a model with weights {recipe.tuned.model}, and this model has "
                f"weights {weights}; tune a recipe for this model with `kvloom tune`"
            ],
        )


def identity(
    model: PreTrainedModel, read: Callable[[str], torch.Tensor] | None = None
) -> dict[str, Any]:
    """Return what identifies a model: its shape, and a digest of the first numbers of each weight.

    Every rank of a divided model has to call this, as it gathers one weight after the other. read:
    returns the weight with a name, or its first numbers, 16 or more; for a model on the meta
    device. Raises `UnsupportedModel` where a weight is not in memory, or its division is not known.
    """
    shard.check_gathers(model)

    def first_numbers() -> Iterator[tuple[str, torch.Size, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            weight = shard.whole(parameter)
            numbers = weight if read is None else read(name)
            yield name, weight.shape, numbers.detach().reshape(-1)[:16]

    ranks = compat.geometry(model).ranks
    return _identified(model, ranks, first_numbers())


def local_identity(model: PreTrainedModel) -> dict[str, Any]:
    """Return what identifies the part of a model that this process holds.

    The digest is of some numbers of each parameter and buffer, see `sample`, but for those of a
    rotary embedding that changes with the length of a text. Raises `UnsupportedModel` as `identity`
    does.
    """
    changing = tuple(f"{name}." for name, x in model.named_modules() if rotary.changes(x))
    buffers = (
        (name, x)
        for name, x in model.named_buffers()
        if not x.is_meta and not name.startswith(changing)
    )

    def some_numbers() -> Iterator[tuple[str, torch.Size, torch.Tensor]]:
        for name, x in (*model.named_parameters(), *buffers):
            yield name, x.shape, sample(shard.local(x).detach().reshape(-1))

    return _identified(model, 1, some_numbers())


def module_attributes(model: PreTrainedModel) -> dict[str, dict[str, int]]:
    """Return the plain attributes of a model's modules by name: each value, and of how many.

    They include what adapters are active, and how they are scaled.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for module in model.modules():
        for name, x in vars(module).items():
            if name not in BOOKKEEPING and name not in _OF_A_CALL and is_plain(x):
                found[name][str(x)] += 1
    return {name: dict(values) for name, values in found.items()}


def is_plain(x: Any) -> bool:
    """Return whether a value is of numbers and text."""
    if isinstance(x, dict):
        return all(map(is_plain, (*x, *x.values())))
    if isinstance(x, list | tuple):
        return all(map(is_plain, x))
    return x is None or isinstance(x, str | int | float | torch.dtype)


def sample(flat: torch.Tensor) -> torch.Tensor:
    """Return 64 numbers of a flat tensor, or all of a shorter one.

    They lie in different rows and columns of a matrix, as they would not at equal distances.
    """
    return flat[_places(len(flat), flat.device)] if len(flat) > _SAMPLE else flat


@cache
def _places(count: int, device: torch.device) -> torch.Tensor:
    """Return places all over a tensor: multiples of the golden ratio."""
    golden = (5**0.5 - 1) / 2
    return torch.tensor([int(i * golden % 1 * count) for i in range(1, _SAMPLE + 1)], device=device)


def _identified(
    model: PreTrainedModel, ranks: int, numbers: Iterable[tuple[str, torch.Size, torch.Tensor]]
) -> dict[str, Any]:
    """Return an identity; numbers: names, shapes and some numbers, which count in bf16."""
    g, digest = compat.geometry(model), hashlib.sha256()
    for name, shape, some in numbers:
        if some.is_meta:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be identified, as {name} is on the "
                "meta device (offloaded, or never loaded); load it with all weights in memory"
            )
        digest.update(f"{name} {tuple(shape)}".encode())
        digest.update(
            some.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
        )
    return {
        "model": type(model).__name__, "layers": g.layers, "kv_heads": g.kv_heads * ranks,
        "head_dim": g.head_dim, "weights": digest.hexdigest()[:16],
    }  # fmt: skip


def _path(model: PreTrainedModel, recipe: Recipe) -> Path:
    if recipe.store.calibration is not None:
        return Path(recipe.store.calibration)
    if model.name_or_path:
        path = Path(model.name_or_path) / CALIBRATION_FILE
        if path.is_file():
            return path
    raise CalibrationError(
        "it needs a calibration of this model: run `kvloom calibrate MODEL --text FILE --out "
        f"{CALIBRATION_FILE}` and add calibration={CALIBRATION_FILE} to the recipe, or put that "
        "file beside the model's weights"
    )


def undoable_ropes(model: PreTrainedModel) -> dict[int, Rope]:
    """Return the rotary embedding of each compressed layer, by its index in the model.

    It is one by no angle in a layer that does not rotate its keys. Raises `CalibrationError` if no
    layer rotates them, or if this cannot be undone.
    """
    try:
        ropes = rotary.layer_ropes(model)
    except UnsupportedModel:
        ropes = ()
    rope = next(filter(None, ropes), None)
    if rope is None:
        raise CalibrationError(
            f"keys cannot be packed before RoPE: {type(model).__name__} has no rotary embedding "
            "that can be undone and redone; use pre_rope=false"
        )
    identity = Rope(torch.zeros_like(rope.inv_freq))
    layer_indices = compat.geometry(model).layer_indices
    return {i: rope or identity for i, rope in zip(layer_indices, ropes, strict=True)}


def recipe_for(model: PreTrainedModel, recipe: Recipe) -> Recipe:
    """Return the recipe as the layers of a model follow it: see `Recipe.for_model`."""
    adapted = recipe.for_model(compat.geometry(model))
    if adapted.rotates_queries:
        try:
            rotary.layer_ropes(model)
        except UnsupportedModel:
            return adapted.without_rotation
        if positions := compat.max_positions(model):
            return adapted.within(positions)
    return adapted


def _ropes(model: PreTrainedModel, plain: dict[int, Recipe]) -> dict[int, Rope | None]:
    """Return the rotary embedding of each layer whose score or format needs it, if it has one.

    plain: the plain recipe of each layer, by its index in the model.
    """
    scored = {i: x for i, x in plain.items() if x.keep is not None and x.keep.needs_rope}
    ropes: dict[int, Rope | None] = {}
    if scored:
        of_layers = _score_ropes(model, next(iter(scored.values())))
        ropes = {i: rope for i, rope in zip(plain, of_layers, strict=True) if i in scored}
    if any(x.store.pre_rope for x in plain.values()):
        undoable = undoable_ropes(model)
        ropes |= {i: undoable[i] for i, x in plain.items() if x.store.pre_rope}
    return ropes


def _score_ropes(model: PreTrainedModel, recipe: Recipe) -> tuple[Rope | None, ...]:
    """Return the rotary embedding of each layer, for a score of `recipe`."""
    try:
        return rotary.layer_ropes(model)
    except UnsupportedModel as error:
        raise IncompatibleRecipe(
            recipe.name,
            [
                "its score rotates queries to later positions, and kvloom does not understand "
                f"{type(model).__name__}'s rotary embedding; use another score, such as observation"
            ],
        ) from error


def _layer_facts(
    model: PreTrainedModel, geometry: Geometry, recipe: Recipe, layer_index: int, rope: Rope | None
) -> LayerFacts:
    """Return what one layer's formats need, given its plain recipe; files are read once per model.

    rope: what a score or a format needs; the model may have other frequencies later.
    """
    store = recipe.store
    shape: dict[str, Any] = {
        "head": geometry.first_head, "value_dim": geometry.value_dim, "latent": geometry.latent,
    }  # fmt: skip
    if not store.calibrated:
        return LayerFacts(rope=rope, **shape)
    path = _path(model, recipe)
    stamp = path.stat().st_mtime_ns if path.exists() else None

    def read() -> dict[str, Any]:
        calibration = _read_once(model, (path, stamp), lambda: _calibration(model, path))
        sides = {s: calibration.encoding(layer_index, s, f) for s, f in store.quantized.items()}
        if geometry.ranks > 1:
            heads = geometry.first_head, geometry.kv_heads
            sides = {s: None if x is None else of_heads(x, s, *heads) for s, x in sides.items()}
        return sides

    sides: dict[str, Any] = _read_once(model, (store, path, stamp, layer_index), read)
    return LayerFacts(sides.get("keys"), sides.get("values"), rope, **shape)


def _read_once(model: PreTrainedModel, key: tuple, read: Callable[[], Any]) -> Any:
    """Return what `read` returns; it is called once for a model and a key."""
    results = _READ.setdefault(model, {})
    if key not in results:
        results[key] = read()
    return results[key]


def _calibration(model: PreTrainedModel, path: Path) -> Calibration:
    """Read a calibration; raises `CalibrationError` for one of another model."""
    calibration, this_model = Calibration.load(path), identity(model)
    if calibration.model != this_model:
        raise CalibrationError(
            f"{str(path)!r} is the calibration of {_format_identity(calibration.model)}, and "
            f"this is {_format_identity(this_model)}; calibrate it with `kvloom calibrate`"
        )
    return calibration


def _format_identity(model: dict[str, Any]) -> str:
    return (
        f"{model.get('model')} ({model.get('layers')} layers, {model.get('kv_heads')} key/value "
        f"heads of {model.get('head_dim')}, weights {model.get('weights')})"
    )
