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
    """Yield the rows that `compare` returns, each as soon as its recipe is measured."""
    compat.refuse_unsupported(model)
    exact, *others = with_full(recipes)
    with attachment_restored(model):
        full = measure(model, tokenizer, exact, task, None, progress)
        yield full.row
        for recipe in others:
            yield measure(model, tokenizer, recipe, task, full, progress).row


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved and without repetitions, with `full` first."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))
