"""Measure a list of recipes on one model and one task; `full` is always measured, first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import IncompatibleRecipe
from ..hf import compat
from ..recipe.resolve import resolve
from ..recipe.spec import Recipe
from ..report.errors import logged_line
from ..workload.attachment import attachment_restored
from ..workload.crew import Result, Work
from ..workload.forward import Progress
from ..workload.prefill import Prefilled, groups
from .measure import Measurement, measure
from .needles import Haystack, count_correct
from .passes import measure_all
from .rows import Row
from .task import Task


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    recipes: Sequence[Recipe | str | Path],
    task: Task,
    progress: Progress | None = None,
) -> list[Row]:
    """Measure recipes on a task; the model is left as it was.

    Args:
        model: The model, loaded.
        tokenizer: The model's.
        recipes: Recipes, their names or their files.
        task: As `prepare` returns it.
        progress: Called with `task.units` units for each recipe of `with_full(recipes)`.

    Returns:
        One row for each recipe, that of `full` always first.
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

    A recipe that does not fit the model, or raises an error, gets a row with the reason; the
    traceback of a defect is logged.
    """
    compat.refuse_unsupported(model)
    comparison = _Comparison(model, tokenizer, task, progress or (lambda what, units: None))
    with attachment_restored(model):
        for group in groups(model, with_full(recipes), len(task.text), task.context):
            yield from comparison.rows(group)


def with_full(recipes: Sequence[Recipe | str | Path]) -> list[Recipe]:
    """Return the recipes, resolved and without repetitions, with `full` first."""
    return list(dict.fromkeys(resolve(recipe) for recipe in ("full", *recipes)))


@dataclass
class _Subject:
    """A recipe: the units of progress left, its correct answers so far, or why it failed."""

    recipe: Recipe
    units: int
    correct: int = 0
    problem: Row | None = None

    def fail(self, error: Exception) -> None:
        """Keep the reason; log a defect."""
        name = self.recipe.name
        if isinstance(error, IncompatibleRecipe):
            self.problem = Row(name, problem="; ".join(error.problems))
        else:
            problem = logged_line(error, f"recipe {name!r}")
            self.problem = Row(name, problem=problem, failed=True)


class _Comparison:
    """Measures groups of recipes on a task; the first group begins with `full`."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, task: Task, progress: Progress
    ) -> None:
        self.model, self.tokenizer, self.task, self.progress = model, tokenizer, task, progress
        self.full: Measurement | None = None

    @torch.inference_mode()
    def rows(self, group: Sequence[Recipe]) -> Iterator[Row]:
        """Yield the rows of recipes; one forward pass per prompt fills the caches of all."""
        subjects = [_Subject(recipe, self.task.units) for recipe in group]
        *before, (text, _) = self.task.prompts
        for number, (ids, haystack) in enumerate(before):
            answer = partial(self._answer, haystack)
            for subject, correct in self._each(subjects, number, ids, answer):
                subject.correct += correct or 0
        for subject, found in self._each(subjects, len(before), text, self._row):
            row = found or subject.problem
            assert row is not None
            yield row

    def _each(
        self,
        subjects: Sequence[_Subject],
        number: int,
        ids: Tensor,
        measure: Callable[[_Subject, Prefilled], Work[Result]],
    ) -> Iterator[tuple[_Subject, Result | None]]:
        """Yield what is measured of each recipe on prompt `number`; None if it failed."""
        left = {subject.recipe: subject for subject in subjects if subject.problem is None}
        who = f"{len(left)} recipes" if len(left) > 1 else "".join(r.name for r in left)
        what = f"{who}: reading context {number + 1} of {len(self.task.prompts)}"

        def measured(filled: Prefilled) -> Work[Result]:
            subject = left[filled.recipe]
            subject.units -= 1
            self.progress(what, 1)
            return measure(subject, filled)

        self.progress(what, 0)
        results = measure_all(self.model, list(left), ids, measured)
        for subject in subjects:
            result = None
            if subject.problem is None:
                _, found = next(results)
                if isinstance(found, Exception):
                    subject.fail(found)
                    self._count(subject, subject.units, "no figures")
                else:
                    result = found
            yield subject, result

    def _answer(
        self, haystack: Haystack | None, subject: _Subject, filled: Prefilled | None
    ) -> Work[int]:
        """Return the correct answers to the questions about a haystack; None: only warm up."""
        if haystack is None:
            return 0
        correct = yield from count_correct(
            self.model, self.tokenizer, subject.recipe, haystack, len(self.task.text),
            self.task.ask, None if filled is None else filled.cache,
        )  # fmt: skip
        self._count(subject, len(haystack.questions), "answering needle questions")
        return correct

    def _row(self, subject: _Subject, filled: Prefilled) -> Work[Row]:
        """Return the row of a recipe whose cache holds the text."""
        count = partial(self._count, subject)
        found = yield from measure(self.model, filled, self.task, self.full, count)
        self.full = self.full or found
        for haystack in () if self.task.reads_haystacks else self.task.haystacks:
            subject.correct += yield from self._answer(haystack, subject, None)
        questions = self.task.questions
        return replace(found.row, needle=subject.correct / questions if questions else None)

    def _count(self, subject: _Subject, units: int, what: str) -> None:
        """Report finished units of a recipe's progress."""
        subject.units -= units
        self.progress(f"{subject.recipe.name}: {what}", units)
