"""Measure a list of recipes on one model and one task; `full` is always measured, first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from kvloom import Cache
from kvloom.errors import IncompatibleRecipe
from kvloom.hf import attachment_restored, supported_model
from kvloom.progress import Progress
from kvloom.recipe import Recipe

from ...report.errors import logged_line
from ...workload.crew import Work
from ...workload.prefill import Prefilled
from ..passes import measure_all, with_full
from .measure import Measurement, measure
from .needles import Haystack, count_correct
from .rows import Row
from .task import ComparisonTask


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    recipes: Sequence[Recipe | str | Path],
    task: ComparisonTask,
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
    task: ComparisonTask,
    progress: Progress | None = None,
) -> Iterator[Row]:
    """Yield the rows that `compare` returns, as soon as they are measured.

    A recipe that does not fit the model, or raises an error, gets a row with the reason; the
    traceback of a defect is logged.
    """
    supported_model(model)
    every, prompts = with_full(recipes), [ids for ids, _ in task.prompts]
    comparison = _Comparison(model, tokenizer, task, progress or (lambda what, units: None), every)
    with attachment_restored(model):
        for recipe, results in measure_all(
            model, every, prompts, comparison.measure, comparison.on_pass
        ):
            yield comparison.row(recipe, results)


class _PromptResult(NamedTuple):
    """What a recipe did on one prompt: questions it answered correctly, and figures of the text."""

    correct: int
    text: Measurement | None = None


class _Comparison:
    """Measures a recipe on each prompt of a task, and reports progress.

    haystack_of_prompt: None for a prompt that is text. left: the units of progress that each recipe
    has left.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        task: ComparisonTask,
        progress: Progress,
        recipes: Sequence[Recipe],
    ) -> None:
        self.model, self.tokenizer, self.task, self.progress = model, tokenizer, task, progress
        self.haystack_of_prompt = [haystack for _, haystack in task.prompts]
        self.left = dict.fromkeys(recipes, task.units)

    def on_pass(self, number: int, recipes: Sequence[Recipe]) -> None:
        """Report that a prompt is read for these recipes."""
        who = f"{len(recipes)} recipes" if len(recipes) > 1 else recipes[0].name
        self.progress(f"{who}: reading context {number + 1} of {len(self.haystack_of_prompt)}", 0)

    def measure(
        self, number: int, filled: Prefilled, full: _PromptResult | None
    ) -> Work[_PromptResult]:
        """Measure a recipe whose cache holds prompt `number`: a haystack, or at last the text."""
        recipe = filled.recipe
        self._count(recipe, "reading contexts", 1)
        if number < len(self.haystack_of_prompt) - 1:
            haystack = self.haystack_of_prompt[number]
            if haystack is None:  # to warm up
                return _PromptResult(0)
            return _PromptResult((yield from self._answer(recipe, haystack, filled.cache)))
        exact = None if full is None else full.text
        measurement = yield from measure(
            self.model, filled, self.task, exact, partial(self._count, recipe)
        )
        correct = 0
        for haystack in () if self.task.reads_haystacks else self.task.haystacks:
            correct += yield from self._answer(recipe, haystack, None)
        return _PromptResult(correct, measurement)

    def row(self, recipe: Recipe, results: list[_PromptResult] | Exception) -> Row:
        """Return the row of a recipe: its figures, or the reason why they are missing."""
        if isinstance(results, Exception):
            self._count(recipe, "no figures", self.left[recipe])
            if isinstance(results, IncompatibleRecipe):
                return Row(recipe.name, problem="; ".join(results.problems))
            problem = logged_line(results, f"recipe {recipe.name!r}")
            return Row(recipe.name, problem=problem, failed=True)
        text, questions = results[-1].text, self.task.questions
        assert text is not None
        correct = sum(one.correct for one in results)
        return replace(text.row, needle=correct / questions if questions else None)

    def _answer(self, recipe: Recipe, haystack: Haystack, cache: Cache | None) -> Work[int]:
        """Return the correct answers to the questions about a haystack, which `cache` holds."""
        correct = yield from count_correct(
            self.model, self.tokenizer, recipe, haystack, len(self.task.text), self.task.ask, cache
        )
        self._count(recipe, "answering needle questions", len(haystack.questions))
        return correct

    def _count(self, recipe: Recipe, what: str, units: int) -> None:
        """Report finished units of a recipe's progress."""
        self.left[recipe] -= units
        self.progress(f"{recipe.name}: {what}", units)
