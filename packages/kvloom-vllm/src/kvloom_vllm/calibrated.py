"""The calibration of an engine's model: which file, and whether it belongs to the model.

vLLM joins some weights of a model, so the model is identified by its checkpoint on disk, as
`kvloom.hf.layer_facts.identity` identifies the model in transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvloom.errors import CalibrationError
from kvloom.hf import CALIBRATION_FILE, identity
from kvloom.recipe import Recipe
from kvloom.store import Calibration, LayerEncoding


class Calibrated:
    """The calibration of a model that a recipe needs, read and checked once.

    folder: of the model's checkpoint. Raises `CalibrationError` for a file that is missing,
    damaged or of another model, and for a checkpoint without safetensors.
    """

    def __init__(self, recipe: Recipe, folder: str | Path, config: Any) -> None:
        path = recipe.store.calibration
        self.file = Calibration.load(Path(folder) / CALIBRATION_FILE if path is None else path)
        identity = checkpoint_identity(Path(folder), config)
        if self.file.model != identity:
            raise CalibrationError(
                f"{self.file.name} is the calibration of a model with weights "
                f"{self.file.model.get('weights')}, and this model has weights "
                f"{identity['weights']}; calibrate it with `kvloom calibrate`"
            )

    def encodings(
        self, recipe: Recipe, layer: int
    ) -> tuple[LayerEncoding | None, LayerEncoding | None]:
        """Return the calibrated encodings of keys and of values of a layer's plain recipe."""
        formats = recipe.store.quantized
        keys, values = (
            self.file.encoding(layer, side, formats[side]) if side in formats else None
            for side in ("keys", "values")
        )
        return keys, values


def checkpoint_identity(folder: Path, config: Any) -> dict[str, Any]:
    """Return what identifies the model of a folder, given its config of transformers."""
    files = sorted(folder.glob("*.safetensors"))
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)

    def read(name: str) -> Tensor:
        if name not in where:
            raise CalibrationError(
                f"{folder} has no safetensors file with {name}, so the model of a calibration "
                "cannot be checked; use a folder of safetensors, or a recipe without calibration"
            )
        with safe_open(where[name], "pt") as opened:
            part = opened.get_slice(name)
            shape = part.get_shape()
            rows = -(-16 // max(1, torch.Size(shape[1:]).numel()))
            shard: Tensor = part[:rows]
            return shard

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return identity(model, read=read)
