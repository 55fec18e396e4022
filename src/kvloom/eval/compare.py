"""Measure a list of recipes on one model and one task; `full` is always measured, first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..hf import compat
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..workload import crew
from ..workload.attachment import attachment_restored
from ..workload.forward import Progress
from ..workload.prefill import groups
from .contexts import read_contexts
from .measure import Measurement, measure
from .rows import Row
from .task import Task


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    recipes: Sequence[Recipe | str | Path],
    task: Task,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure recipes on a task; return one `Row` each, that of `full` always first.

    recipes: recipes, their names or their files. progress: called with `task.units` units for each
    recipe of `with_full(recipes)`. The model is left as it was.
    """
    return list(iter_rows(model, tokenizer, recipes, task, progress))


def iter_rows(
    model: PreTrainedModel,
    tokenizer: Any,
    recipes: Sequence[Recipe | str | Path],
    task: Task,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yield the rows that `compare` returns, as soon as they are measured.

    One forward pass per prompt fills the caches of a group of recipes; see `workload.prefill`. Then
    `crew.TOGETHER` recipes of the group decode as one batch; `full` comes first, alone.
    """
    compat.refuse_unsupported(model)
    on_step = progress or (lambda what, units: None)
    rows = sum(prompt.shape[0] for prompt in task.prompts)
    full: Measurement | None = None
    with attachment_restored(model):
        for group in groups(model, with_full(recipes), rows, task.context):
            contexts = read_contexts(model, group, task, on_step)
            while contexts:
                count = 1 if full is None else crew.TOGETHER
                some, contexts = contexts[:count], contexts[count:]
                works = [measure(model, tokenizer, one, task, full, on_step) for one in some]
                with torch.inference_mode():
                    found = crew.run_together(model, works)
                for one in found:
                    if isinstance(one, Exception):
                        raise one
                    full = full or one
                    yield one.row


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved and without repetitions, with `full` first."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))
