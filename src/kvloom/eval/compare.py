"""Measure a list of recipes on one model and one task; `full` is always measured, first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..hf import compat
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..workload.attachment import attachment_restored
from ..workload.forward import Progress
from ..workload.prefill import groups
from .contexts import read_contexts
from .measure import measure
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
    """Yield the rows that `compare` returns, each as soon as its recipe is measured.

    One forward pass per prompt fills the caches of a group of recipes; see `workload.prefill`. Then
    the recipes of the group are measured one by one.
    """
    compat.refuse_unsupported(model)
    on_step = progress or (lambda what, units: None)
    rows = sum(prompt.shape[0] for prompt in task.prompts)
    full = None
    with attachment_restored(model):
        for group in groups(model, with_full(recipes), rows, task.context):
            contexts = read_contexts(model, group, task, on_step)
            while contexts:
                found = measure(model, tokenizer, contexts.pop(0), task, full, on_step)
                full = full or found
                yield found.row


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved and without repetitions, with `full` first."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))
