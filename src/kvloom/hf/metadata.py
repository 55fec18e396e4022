"""What a recipe's formats must know of a model: its calibration and its rotary embedding.

Decides where a calibration is looked for and whether it is this model's. Read once a model and
recipe, not once a cache.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ..errors import CalibrationError, IncompatibleRecipe, UnsupportedModel
from ..positions.rope import Rope
from ..recipe.spec import Recipe
from ..store import NOTHING, Known, Store
from ..store.calibration import Calibration
from . import compat, rotary

BESIDE = "calibration.kvcal"
"""The name under which a calibration is found in the folder of a model's weights.

Not `.safetensors`, although that is the format: loaders such as vLLM's take every `*.safetensors`
file in that folder for weights.
"""
_FORMER = "calibration.safetensors"

_READ: WeakKeyDictionary[PreTrainedModel, dict[tuple, list[Known]]] = WeakKeyDictionary()


def known(model: PreTrainedModel, recipe: Recipe) -> list[Known]:
    """What each layer of full attention is told; `IncompatibleRecipe` if it cannot be known."""
    store, count = recipe.store, compat.geometry(model).layers
    if not store.calibrated and not store.pre_rope:
        return [NOTHING] * count
    path = _path(model, recipe) if store.calibrated else None
    stamp = None if path is None or not path.exists() else path.stat().st_mtime_ns
    read = _READ.setdefault(model, {})
    key = (store, path, stamp)
    if key not in read:
        try:
            rope = undoable_rope(model) if store.pre_rope else None
            read[key] = _layers(model, store, path, rope, count)
        except CalibrationError as error:
            raise IncompatibleRecipe(recipe.name, [str(error)]) from error
    return read[key]


def identity(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from others: its shape, and a digest of some of each weight, in bf16.

    Raises `UnsupportedModel` where a weight is not in memory.
    """
    g, digest = compat.geometry(model), hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.is_meta:
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be told from models like it, as {name} lies on the "
                "meta device (offloaded, or never loaded); load it with all weights in memory"
            )
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        some = weight.detach().reshape(-1)[:16].to("cpu", torch.bfloat16)
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return {"model": type(model).__name__, "layers": g.layers, "kv_heads": g.kv_heads,
            "head_dim": g.head_dim, "weights": digest.hexdigest()[:16]}  # fmt: skip


def _path(model: PreTrainedModel, recipe: Recipe) -> Path:
    if recipe.store.calibration is not None:
        return Path(recipe.store.calibration)
    if model.name_or_path:
        for name in (BESIDE, _FORMER):
            path = Path(model.name_or_path) / name
            if path.is_file():
                return path
    raise IncompatibleRecipe(
        recipe.name,
        [
            "it needs a calibration of this model: run `kvloom calibrate MODEL --text FILE "
            f"--out {BESIDE}` and add calibration={BESIDE} to the recipe, or put that file "
            "beside the model's weights"
        ],
    )


def undoable_rope(model: PreTrainedModel) -> Rope:
    """The model's rotary embedding; raises `CalibrationError` if it cannot be undone."""
    try:
        found = rotary.rope(model)
    except UnsupportedModel:
        found = None
    if found is None:
        raise CalibrationError(
            f"keys cannot be packed before RoPE: {type(model).__name__} has no rotary embedding "
            "that can be undone and redone; use pre_rope=false"
        )
    return found


def _layers(
    model: PreTrainedModel, store: Store, path: Path | None, rope: Rope | None, count: int
) -> list[Known]:
    if path is None:
        return [Known(rope=rope)] * count
    calibration, own = Calibration.load(path), identity(model)
    if calibration.model != own:
        raise CalibrationError(
            f"{str(path)!r} is the calibration of {_spell(calibration.model)}, and this is "
            f"{_spell(own)}; calibrate it with `kvloom calibrate`"
        )
    full = [i for i, (kind, _) in enumerate(compat.stock_layers(compat.decoder_config(model)))
            if kind == compat.FULL]  # fmt: skip
    layers = []
    for i in full:
        sides = {side: calibration.channels(i, side, f) for side, f in store.quantized.items()}
        layers.append(Known(sides.get("keys"), sides.get("values"), rope))
    return layers


def _spell(model: dict[str, Any]) -> str:
    return (
        f"{model.get('model')} ({model.get('layers')} layers, {model.get('kv_heads')} key/value "
        f"heads of {model.get('head_dim')}, weights {model.get('weights')})"
    )
