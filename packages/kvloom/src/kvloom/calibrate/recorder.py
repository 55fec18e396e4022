"""Run a model on a text and pass every layer's attention inputs to a function; store nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import UnsupportedModel
from ..hf.cache import Cache
from ..hf.recording import Observer, record_layers
from ..recipe.spec import Recipe


def record(model: PreTrainedModel, ids: Tensor, observer: Observer) -> None:
    """Run the model on contexts ids [B, T] and call the observer once a layer."""
    cache = Cache(model, Recipe())
    if cache.geometry.latent:
        raise UnsupportedModel(
            f"{type(model).__name__} stores latents (MLA), which have neither keys nor values to "
            "calibrate or analyse; use a format without a calibration"
        )
    record_layers(cache, cache, observer)
    with torch.inference_mode():
        model.base_model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
