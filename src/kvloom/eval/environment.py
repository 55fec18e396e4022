"""The conditions of a comparison besides the recipe: machine, model, text and sizes."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ..report.machine import machine
from .task import Task


def environment(
    model: PreTrainedModel, name: str, task: Task, seed: int, text: str = ""
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
