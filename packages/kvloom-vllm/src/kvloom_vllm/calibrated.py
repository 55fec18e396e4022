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
from kvloom.store import Calibration


def load_calibration(path: str | None, folder: str | Path, config: Any) -> Calibration:
    """Return the calibration of the model of a checkpoint's folder.

    path: the file; None: that of the folder. config: of transformers. Raises `CalibrationError` for
    a file that is missing, damaged or of another model, and for a checkpoint without safetensors.
    """
    found = Calibration.load(Path(folder) / CALIBRATION_FILE if path is None else path)
    model = checkpoint_identity(Path(folder), config)
    if found.model != model:
        raise CalibrationError(
            f"{found.name} is the calibration of a model with weights "
            f"{found.model.get('weights')}, and this model has weights {model['weights']}; "
            "calibrate it with `kvloom calibrate`"
        )
    return found


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
