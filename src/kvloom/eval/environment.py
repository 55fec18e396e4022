"""The conditions of a comparison besides the recipe: machine, model, text and sizes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..recipe.geometry import Geometry
from ..report.machine import machine, weights_sha256
from .comparison_task import ComparisonTask


def environment(
    model: PreTrainedModel, name: str, task: ComparisonTask, seed: int, text: str = ""
) -> dict[str, Any]:
    """Return versions, hardware and sizes as plain data. name: of the model; text: its name."""
    return {
        **machine(model),
        "model": name,
        "text": text,
        "context": task.context,
        "new_tokens": task.new_tokens,
        "batch": task.text.shape[0],
        "questions": task.questions,
        "ask": task.ask,
        "seed": seed,
    }


def model_facts(model: PreTrainedModel, name: str, geometry: Geometry) -> dict[str, Any]:
    """Return what identifies a model in results: its name, a hash of its weights, and its shape."""
    return {
        "name": name,
        "weights": weights_sha256(model),
        "layers": geometry.layers,
        "heads": geometry.q_heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
    }
